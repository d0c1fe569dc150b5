"""Fetches a model from the hub into a directory, once: what another model left beside it is removed.

Arguments: repository, revision, directory, patterns of files. Any of Espalier's images can run it: all have the hub's
client.
"""

import shutil
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

repository, revision, target, *patterns = sys.argv[1:]
directory = Path(target)
done = directory / ".fetched"
wanted = "\n".join(patterns)
if done.is_file() and done.read_text() == wanted:
    sys.exit(0)
for other in directory.parent.iterdir():
    if other != directory:
        shutil.rmtree(other, ignore_errors=True)
try:
    snapshot_download(repository, revision=revision, local_dir=directory, allow_patterns=patterns)
except Exception as error:  # the client raises its own, its HTTP library's and OSErrors
    sys.exit(f"fetch_model: {repository} at {revision}: {error}")
done.write_text(wanted)
