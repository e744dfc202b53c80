"""Finding a workload in the user's code, and its parameters. No torch: nothing is built here."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from memfit.errors import UsageError, WorkloadError
from memfit.workload import Workload, import_workload, load, split_target, user_traceback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Write = Callable[..., str]

PARAMETERS = """
    from typing import ClassVar, Literal

    import memfit

    class Small(memfit.Workload):
        '''A small one.

        With more to say.
        '''

        layers: int = 2
        rate: float = 0.1
        tied: bool = False
        kind: Literal["relu", "gelu"] = "relu"
        limit: int | None = None
        name: str = "none"
        shape: tuple[int, ...] = (1, 2)
        shared: ClassVar[int] = 3
        _hidden: int = 4
        constant = 5
"""
FUNCTIONS = """
    '''A model as plain functions.'''

    def model(): return "model"
    def batch(m): return m
    def loss(model, batch): return (model, batch)
"""


@pytest.fixture(autouse=True)
def _clean_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no trace of the modules that a test imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, name: str = "work.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(text))
        return name

    return write


def refused(target: str, **parameters: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load(target, parameters)
    return caught.value


def failed(target: str) -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        load(target, {})
    assert caught.value.details is not None
    return caught.value


@pytest.mark.parametrize(
    ("target", "location", "name"),
    [
        ("work.py", "work.py", None),
        ("work.py:", "work.py", None),
        ("work.py:Small", "work.py", "Small"),
        ("./work.py", "./work.py", None),
        ("package.module", "package.module", None),
        ("package.module:Small", "package.module", "Small"),
    ],
)
def test_a_target_is_a_place_and_a_name(
    write: Write, target: str, location: str, name: str | None
) -> None:
    write("")
    assert split_target(target) == (location, name)


def test_a_colon_in_a_folder_is_no_separator(write: Write) -> None:
    write("", "run:3/work.py")
    assert split_target("run:3/work.py") == ("run:3/work.py", None)


def test_the_one_workload_of_a_file_is_taken(write: Write) -> None:
    info = load(write(PARAMETERS), {}).info

    assert (info.name, info.description, info.path) == ("Small", "A small one.", "work.py")
    assert info.sha256 is not None
    assert len(info.sha256) == 64


def test_a_class_without_words_of_its_own_has_no_description(write: Write) -> None:
    words = PARAMETERS.replace("'''A small one.", "_said = '''A small one.")

    info = load(write(words), {}).info
    assert (info.name, info.description) == ("Small", "")


def test_a_workload_of_a_module_is_found_by_its_dotted_name(write: Write) -> None:
    write("", "package/__init__.py")
    write(PARAMETERS, "package/work.py")

    info = load("package.work:Small", {}).info

    assert (info.name, info.path) == ("Small", None)
    assert info.sha256 == hashlib.sha256(Path("package/work.py").read_bytes()).hexdigest()


def test_a_module_of_functions_serves_as_well(write: Write) -> None:
    loaded = load(write(FUNCTIONS), {})
    made = loaded.make()

    assert (loaded.info.name, loaded.info.description) == ("work", "A model as plain functions.")
    assert made.loss(made.model(), made.batch(3)) == ("model", 3)
    assert not made.counts_elements()


def test_functions_may_count_elements(write: Write) -> None:
    assert load(write(FUNCTIONS + "    def count(batch): return 7\n"), {}).make().count(None) == 7


def test_an_imported_workload_is_not_the_files_own(write: Write) -> None:
    write(PARAMETERS, "base.py")
    assert load(write("from base import Small\nclass Mine(Small): pass"), {}).info.name == "Mine"


def test_an_imported_workload_can_be_picked_by_name(write: Write) -> None:
    write(PARAMETERS, "base.py")
    write("from base import Small")
    assert load("work.py:Small", {}).info.name == "Small"


def test_several_workloads_are_listed_and_one_has_to_be_picked(write: Write) -> None:
    write(PARAMETERS + "    class Tiny(Small): pass\n")
    error = refused("work.py")

    assert error.message == "work.py has 2 workloads: Small, Tiny"
    assert error.hint == "pick one: work.py:Small"
    assert load("work.py:Tiny", {}).info.name == "Tiny"


def test_a_name_that_is_no_workload_is_told_with_those_there_are(write: Write) -> None:
    write(PARAMETERS)
    error = refused("work.py:Smal")

    assert error.message == "work.py:Smal: there is no workload 'Smal'"
    assert error.hint == "it has Small"


def test_a_file_without_a_workload_is_told_how_to_write_one(write: Write) -> None:
    error = refused(write("x = 1"))

    assert error.message == "work.py has no workload"
    assert error.hint is not None
    assert "model(), batch(m) and loss(model, batch)" in error.hint


@pytest.mark.parametrize("missing", ["model", "batch", "loss"])
def test_a_missing_function_is_named(write: Write, missing: str) -> None:
    lines = [line for line in FUNCTIONS.splitlines() if f"def {missing}(" not in line]
    assert refused(write("\n".join(lines))).message.endswith(f"it has no {missing}()")


def test_a_module_that_is_not_there_is_told_with_the_nearest_file(write: Write) -> None:
    write(PARAMETERS)
    error = refused("work.pi")

    assert error.message == "there is no file or module 'work.pi'"
    assert error.hint == "did you mean work.py?"


def test_a_workload_after_a_dot_is_told_to_need_a_colon(write: Write) -> None:
    write(PARAMETERS, "module.py")
    assert refused("module.SmallOne").hint == "did you mean module:SmallOne?"


def test_a_missing_package_is_no_memfit_matter(write: Write) -> None:
    assert refused("no.such.module:X").message == "there is no file or module 'no.such.module'"


@pytest.mark.parametrize(
    ("code", "line", "error"),
    [
        ("def model():\n    return [1, 2\ndef batch(m): ...\n", "return [1, 2", "SyntaxError"),
        ("RATE = 1\nraise RuntimeError('no data')\n", "line 2", "RuntimeError: no data"),
        ("import no_such_package\n", "import no_such_package", "ModuleNotFoundError"),
        ("import sys\nsys.exit(0)\n", "sys.exit(0)", "SystemExit: 0"),
    ],
)
@pytest.mark.parametrize("form", ["file", "module"])
def test_code_that_fails_at_import_shows_the_users_line_and_none_of_ours(
    write: Write, code: str, line: str, error: str, form: str
) -> None:
    write(code)
    failure = failed("work.py" if form == "file" else "work")

    assert "work" in failure.message
    assert f"failed while it was imported: {error}" in failure.message
    assert line in (failure.details or "")
    assert "memfit" not in (failure.details or "")
    assert "importlib" not in (failure.details or "")


def test_a_package_that_fails_at_import_is_the_users_error(write: Write) -> None:
    write("raise RuntimeError('bad package')", "package/__init__.py")
    write(PARAMETERS, "package/work.py")
    assert "RuntimeError: bad package" in failed("package.work:Small").message


def test_the_causes_of_an_error_at_import_are_shown(write: Write) -> None:
    write(
        """
        def read():
            try:
                open("no-such-file")
            except OSError as error:
                raise RuntimeError("no data") from error
        read()
        """
    )
    details = failed("work.py").details
    assert details is not None
    assert "FileNotFoundError" in details
    assert details.rstrip().endswith("RuntimeError: no data")


def test_ctrl_c_while_importing_is_no_error_of_the_user(write: Write) -> None:
    write("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load("work.py", {})


def test_only_annotated_public_fields_are_parameters(write: Write) -> None:
    assert load(write(PARAMETERS), {}).info.parameters == {
        "layers": 2,
        "rate": 0.1,
        "tied": False,
        "kind": "relu",
        "limit": None,
        "name": "none",
        "shape": "(1, 2)",
    }


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("layers", "12", 12),
        ("rate", "3e-4", 3e-4),
        ("rate", "1", 1.0),
        ("tied", "true", True),
        ("tied", "False", False),
        ("tied", "1", True),
        ("kind", "gelu", "gelu"),
        ("limit", "7", 7),
        ("limit", "null", None),
        ("limit", "None", None),
        ("name", "None", "None"),
        ("name", "12", "12"),
        ("name", "", ""),
    ],
)
def test_text_becomes_the_type_of_the_annotation(
    write: Write, name: str, text: str, value: object
) -> None:
    loaded = load(write(PARAMETERS), {name: text})

    assert loaded.info.parameters[name] == value
    made = getattr(loaded.make(), name)
    assert (type(made), made) == (type(value), value)


def test_every_trial_gets_an_object_of_its_own(write: Write) -> None:
    loaded = load(write(PARAMETERS), {"layers": "3"})
    one, other = loaded.make(), loaded.make()

    assert one is not other
    assert type(one).layers == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "text", "takes", "hint"),
    [
        ("layers", "many", "layers takes int", "as in --set layers=2"),
        ("layers", "1.5", "layers takes int", "as in --set layers=2"),
        ("rate", "fast", "rate takes float", "as in --set rate=0.1"),
        ("tied", "maybe", "tied takes bool", "as in --set tied=False"),
        ("kind", "tanh", "kind takes relu or gelu", "as in --set kind=relu"),
        ("limit", "most", "limit takes int | None", None),
    ],
)
def test_a_value_of_the_wrong_type_is_told_with_the_right_one(
    write: Write, name: str, text: str, takes: str, hint: str | None
) -> None:
    error = refused(write(PARAMETERS), **{name: text})

    assert error.message == f"--set {name}={text}: {takes}"
    assert error.hint == hint


def test_an_unknown_parameter_is_told_with_the_nearest(write: Write) -> None:
    error = refused(write(PARAMETERS), layer="3")

    assert error.message == "Small has no parameter 'layer'"
    assert error.hint is not None
    assert error.hint.startswith("it has layers")


@pytest.mark.parametrize("name", ["shared", "_hidden", "constant"])
def test_what_is_no_parameter_cannot_be_set(write: Write, name: str) -> None:
    assert refused(write(PARAMETERS), **{name: "1"}).message == f"Small has no parameter {name!r}"


def test_a_parameter_of_a_workload_without_any_is_refused(write: Write) -> None:
    assert refused(write(FUNCTIONS), width="1").hint == "it has no parameters at all"


def test_a_parameter_without_a_default_has_to_be_given(write: Write) -> None:
    target = write("import memfit\nclass Needy(memfit.Workload):\n    width: int\n")
    error = refused(target)

    assert error.message == "Needy needs a value for width"
    assert error.hint == "add --set width=VALUE"
    assert load(target, {"width": "3"}).info.parameters == {"width": 3}


def test_parameters_are_inherited(write: Write) -> None:
    write(PARAMETERS + "    class Tiny(Small):\n        layers: int = 1\n        more: int = 9\n")
    parameters = load("work.py:Tiny", {"rate": "0.5"}).info.parameters

    assert (parameters["layers"], parameters["rate"], parameters["more"]) == (1, 0.5, 9)


def test_annotations_may_be_strings(write: Write) -> None:
    target = write("from __future__ import annotations\n" + dedent(PARAMETERS))
    assert load(target, {"limit": "3"}).info.parameters["limit"] == 3


def test_an_annotation_that_cannot_be_read_is_the_users_error(write: Write) -> None:
    write("import memfit\nclass Odd(memfit.Workload):\n    width: 'Missing' = 3\n")
    assert failed("work.py").message.startswith("the annotations of Odd cannot be read: NameError")


@pytest.mark.parametrize("name", ["model", "batch", "loss", "count"])
def test_the_base_class_trains_nothing(name: str) -> None:
    arguments = {"model": 0, "batch": 1, "loss": 2, "count": 1}[name]
    with pytest.raises(NotImplementedError):
        getattr(Workload(), name)(*[None] * arguments)


def test_a_workload_may_be_in_the_folder_of_its_helpers(write: Write) -> None:
    write("WIDTH = 3", "other/helpers.py")
    write("from helpers import WIDTH\n" + dedent(FUNCTIONS), "other/work.py")
    assert load("other/work.py", {}).info.name == "work"


def test_a_file_named_like_an_installed_module_is_still_the_users_own(write: Write) -> None:
    assert load(write(FUNCTIONS, "json.py"), {}).make().batch(2) == 2
    assert "dumps" in vars(sys.modules["json"])


def test_a_training_script_makes_a_workload_with_parameters() -> None:
    class Sized(Workload):
        width: int = 8
        depth: int

    made = Sized(width=16, depth=2)
    made.device = "meta"

    assert (made.width, made.depth, made.device.type) == (16, 2, "meta")
    assert Sized().device.type == "cpu"
    with pytest.raises(TypeError, match="Sized has no parameter 'hight'"):
        Sized(hight=1)


def test_a_traceback_tells_files_by_their_path_in_the_project_or_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("site-packages/lib/deep.py", "mine.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "site-packages/lib/deep.py").write_text("def fail():\n    raise ValueError\n")
    (tmp_path / "mine.py").write_text("def call(other):\n    other()\n")
    spaces: list[dict[str, Any]] = []
    for name in ("site-packages/lib/deep.py", "mine.py"):
        space: dict[str, Any] = {}
        exec(compile((tmp_path / name).read_text(), tmp_path / name, "exec"), space)
        spaces.append(space)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ValueError) as raised:  # noqa: PT011 - which one is not the point
        spaces[1]["call"](spaces[0]["fail"])
    told = user_traceback(raised.value)

    assert 'File "mine.py", line 2, in call\n    other()' in told
    assert 'File "lib/deep.py", line 2, in fail\n    raise ValueError' in told


def test_a_smaller_copy_is_no_parameter_and_changes_nothing_by_itself(write: Write) -> None:
    target = write(PARAMETERS + "        verify_with = {'layers': 1, 'limit': None}\n")
    imported = import_workload(target)

    assert imported.small() == {"layers": 1, "limit": None}
    assert "verify_with" not in imported.with_parameters({}).info.parameters
    assert imported.with_parameters({}).info.parameters["layers"] == 2


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("{'layer': 1}", "layer=1, and there is no such parameter"),
        ("{'layers': 'few'}", "layers=few, and it takes int"),
        ("'layers'", "is a str"),
    ],
)
def test_a_smaller_copy_that_cannot_be_made_is_told(write: Write, said: str, words: str) -> None:
    target = write(PARAMETERS + f"        verify_with = {said}\n")

    with pytest.raises(WorkloadError, match=words):
        import_workload(target).small()


HELPED = """
    from parts.layers import WIDTH
    import memfit

    class Helped(memfit.Workload):
        width: int = WIDTH
"""


def test_a_change_in_an_imported_module_of_the_users_is_another_workload(write: Write) -> None:
    write("", "parts/__init__.py")
    write("from .sizes import WIDTH\nimport json, pytest", "parts/layers.py")
    target = write(HELPED)

    def digest(sizes: str) -> str | None:
        write(sizes, "parts/sizes.py")
        for name in [n for n in sys.modules if n == "work" or n.startswith("parts")]:
            del sys.modules[name]
        return import_workload(target).sha256

    first, again, other = digest("WIDTH = 8"), digest("WIDTH = 8"), digest("WIDTH = 9")
    assert first is not None
    assert first == again != other


def test_a_file_that_imports_nothing_of_the_users_has_the_digest_of_its_bytes(write: Write) -> None:
    target = write(PARAMETERS)
    assert import_workload(target).sha256 == hashlib.sha256(Path(target).read_bytes()).hexdigest()


def test_functions_have_no_smaller_copy(write: Write) -> None:
    target = write(FUNCTIONS + "    verify_with = {'width': 1}\n")

    with pytest.raises(WorkloadError, match="sets width=1, and there is no such parameter"):
        import_workload(target).small()
