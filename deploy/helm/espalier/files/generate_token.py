"""Generates one token. Arguments: the gateway's address, the model's name. API_KEYS: keys, one a line."""

import json
import os
import sys
import urllib.request

address, model = sys.argv[1:]
keys = os.environ.get("API_KEYS", "").split()
headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {keys[0]}"} if keys else {})
body = json.dumps({"model": model, "prompt": "Why is the sky blue?", "max_tokens": 1}).encode()
request = urllib.request.Request(f"{address}/v1/completions", body, headers)
try:
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
except OSError as error:
    detail = error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
    sys.exit(f"{address}: {error} {detail}")
if answer["usage"]["completion_tokens"] != 1:
    sys.exit(f"no token: {answer}")
print(f"generated {answer['choices'][0]['text']!r}")
