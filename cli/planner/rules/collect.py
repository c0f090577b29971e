"""Makes rules of functions: `@rules.rule("P201", ...)` over a function that yields hits of a case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from palestra.cli.planner.types import Example, Rule
from palestra.envs.findings import Hit, Severity

if TYPE_CHECKING:
    from palestra.cli.planner.case import Case

Check = Callable[["Case"], Iterable[Hit]]
ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


class Rules(list[Rule]):
    """The rules of one family, in the order in which they are written."""

    def rule(
        self,
        code: str,
        severity: Severity,
        path: str,
        *,
        title: str,
        why: str,
        recipe: str,
        fails: Mapping[str, Any],
        passes: Mapping[str, Any] | None = None,
        after: tuple[str, ...] = (),
    ) -> Callable[[Check], Check]:
        """Enlists the function below.

        `fails`, `passes`: changes of `recipe` for which it holds, and for which it does not (None: the recipe as it is).
        """

        def enlist(check: Check) -> Check:
            self.append(
                Rule(
                    code,
                    severity,
                    path,
                    title,
                    why,
                    check,
                    Example(recipe, dict(fails)),
                    Example(recipe, dict(passes or {})),
                    after,
                )
            )
            return check

        return enlist
