"""Answer questions with the models of a run, before and after training, as they were trained to be asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from modelwright.data.conversations import ask
from modelwright.errors import UsageError
from modelwright.models import text
from modelwright.recipe.load import load
from modelwright.runs.folder import RunFolder
from modelwright.serve.ask import Answerer, Message


class Asker:
    """The models of one run, each loaded when it is first asked."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.recipe = load(folder.recipe, environ={}).recipe
        if "classify" in self.recipe.stages:
            raise UsageError(f"{folder.path} trained an image classifier, which answers no questions")
        self.system_prompt = self.recipe.data_of(list(self.recipe.stages)[-1]).system_prompt
        self._loaded: dict[str, Answerer] = {}

    def answerer(self, who: str) -> Answerer:
        """The model `before` training, or `after`."""
        if who not in self._loaded:
            wish = self.recipe.compare
            path = self._base() if who == "before" else self._tuned()
            self._loaded[who] = Answerer(path, wish.max_new_tokens, wish.temperature, self.recipe.seed)
        return self._loaded[who]

    def messages(self, question: str) -> list[Message]:
        """A question as the model was trained to meet it."""
        return list(ask(question, self.system_prompt))

    def both(self, question: str) -> Iterator[tuple[str, str]]:
        """Pieces of both answers in turn, each with who says it."""
        replies = {who: iter(self.answerer(who).reply(self.messages(question))) for who in ("before", "after")}
        while replies:
            for who in list(replies):
                piece = next(replies[who], None)
                if piece is None:
                    del replies[who]
                else:
                    yield who, piece

    def _base(self) -> Path:
        if self.recipe.model.architecture:
            return self.folder.model("init")
        return text.find(self.recipe.model, self.folder.path).path

    def _tuned(self) -> Path:
        """The promoted model; where no gate has opened yet, the last one trained."""
        models = [self.folder.model(stage) for stage in self.recipe.stages]
        for folder in (self.folder.best_model, *reversed(models)):
            if (folder / "config.json").exists() or (folder / "adapter_config.json").exists():
                return folder
        raise UsageError(f"{self.folder.path} has no trained model yet; finish it with: modelwright run")
