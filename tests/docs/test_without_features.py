"""Each feature can be deleted: the kernel then does all that it does without it."""

import ast
import os
import shutil
from pathlib import Path

import pytest

from tests.forked import run_python

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "langchain_quota"
FEATURES = sorted(
    each.stem for each in (PACKAGE / "features").glob("[!_]*") if each.suffix in ("", ".py")
)
OF_THE_KERNEL = [
    *("test_drop_ins.py", "test_exits.py", "test_repair.py"),
    *("test_resume.py", "test_shared_quotas.py"),
]
"""Tool and model limits, drop-ins, quotas, exits, refunds, resumed runs."""
OTHERS = "not inline and not ask and not finalize and not budgets"
"""Those of their cases that need no feature."""
IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"
"""The process has imported LangChain before pytest, which would say so."""
RUN = "import pytest, sys, langchain_quota as there; assert {src!r} in there.__file__, there; "


class Without(ast.NodeTransformer):
    """Takes a feature's lines out of a module.

    They are the imports from its folder or file, what they import where it stands in a tuple, among
    the bases of a class or in `__all__`.
    """

    def __init__(self, feature: str) -> None:
        self._home = f"features.{feature}"
        self._names: set[str] = set()

    def _is_its(self, node: ast.expr | None) -> bool:
        if isinstance(node, ast.Subscript):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._names

    def _is_in(self, module: object) -> bool:
        return f"{module}.".startswith(f"{self._home}.")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        if not self._is_in((node.module or "").removeprefix("langchain_quota.")):
            return node
        self._names.update(each.name for each in node.names)
        return None

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.bases = [each for each in node.bases if not self._is_its(each)]
        return self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        node.elts = [each for each in node.elts if not self._is_its(each)]
        return node

    def visit_List(self, node: ast.List) -> ast.AST:
        node.elts = [each for each in node.elts if getattr(each, "value", "") not in self._names]
        return node


@pytest.mark.rest
@pytest.mark.parametrize("feature", FEATURES)
def test_the_kernel_without_a_feature(feature: str, tmp_path: Path) -> None:
    """Without its folder and its lines the kernel's tests pass."""
    copy = tmp_path / "src" / "langchain_quota"
    itself = [feature, f"{feature}.py"]

    def left_out(folder: str, _: list[str]) -> list[str]:
        return ["__pycache__", *(itself if Path(folder).name == "features" else ())]

    shutil.copytree(PACKAGE, copy, ignore=left_out)
    for path in copy.rglob("*.py"):
        if f"features.{feature}" in (text := path.read_text()):
            path.write_text(ast.unparse(Without(feature).visit(ast.parse(text))))
    tests = [f"tests/scenario/{each}" for each in OF_THE_KERNEL]
    options = ["-q", "-n0", "-x", "-p", "no:cacheprovider", "-W", IMPORTED, "-k", OTHERS, *tests]
    run = RUN.format(src=str(tmp_path)) + f"sys.exit(pytest.main({options}))"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    done = run_python(run, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
