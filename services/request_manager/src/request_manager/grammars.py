"""Checks grammars before they are admitted, for the model that the verifier has announced."""

import threading
from pathlib import Path

from request_manager.contract import Manager
from treecore.errors import ConfigError, InvalidRequest
from treecore.grammar import GrammarCompiler
from treecore.params import Grammar


class ModelGrammars:
    """Compiles grammars against the tokenizer in `model_dir`. Built at the first use: it takes half a second."""

    def __init__(self, manager: Manager, model_dir: Path) -> None:
        self._manager = manager
        self._model_dir = model_dir
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest if no text can match it, or this model cannot be held to it; Unavailable without one.

        May be called from any thread.
        """
        with self._lock:
            if self._compiler is None:
                self._compiler = self._compile()
        self._compiler.check(grammar)

    def _compile(self) -> GrammarCompiler:
        card = self._manager.card()
        try:
            return GrammarCompiler.from_dir(self._model_dir, card.vocab_size, card.eos_token_ids)
        except ConfigError as error:
            raise InvalidRequest(f"this model has no structured output: {error}") from error
