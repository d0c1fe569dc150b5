"""What the service promises, in one place. Panels and alerts read it; must not know either."""

TTFT_TARGET_S = 2.0
"""A first token that takes longer is late. An upper bound of a bucket of espalier_ttft_seconds."""

TTFT_OBJECTIVE = 0.95
"""Share of first tokens that are not late, in the long run."""

TTFT_LE = f'le="{TTFT_TARGET_S}"'
"""As a matcher."""
