"""A server proves that it runs the checkout it was to be served from."""

import mmap
import os
from types import SimpleNamespace

import pytest

from assay.engines.tree import native_modules, own_build, wrong_tree


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "base/mstar").mkdir(parents=True)
    (tmp_path / "base/mstar/__init__.py").touch()
    return tmp_path / "base"


def plan_of(tree, native=("mstar_rust",)):
    where = {"name": "base", "path": str(tree)}
    return {"arm": "mstar-base", "tree": where, "identity": {"module": "mstar", "native": list(native)}}


def measured(module_file, **native):
    return SimpleNamespace(module_file=module_file and str(module_file), native=native)


def test_a_module_of_the_checkout_is_proven_and_one_of_another_is_not(tree):
    plan = plan_of(tree)
    assert wrong_tree(measured(tree / "mstar/__init__.py", mstar_rust=[]), plan) is None
    why = wrong_tree(measured(tree.parent / "head/mstar/__init__.py", mstar_rust=[]), plan)
    assert f"arm 'mstar-base' is to be served from checkout 'base' ({tree})" in why
    assert "takes module 'mstar' from" in why and "head/mstar/__init__.py" in why and "correct `trees.base`" in why


def test_a_folder_whose_name_only_begins_alike_is_another(tree):
    assert wrong_tree(measured(f"{tree}-old/mstar/__init__.py", mstar_rust=[]), plan_of(tree))


def test_a_link_into_another_checkout_is_seen_through(tree):
    other = tree.parent / "head"
    other.mkdir()
    (other / "serve.py").touch()
    (tree / "serve.py").symlink_to(other / "serve.py")
    assert wrong_tree(measured(tree / "serve.py", mstar_rust=[]), plan_of(tree))


def test_what_cannot_be_measured_proves_nothing(tree):
    assert "nothing tells where" in wrong_tree(measured(None, mstar_rust=[]), plan_of(tree))


def test_an_arm_without_a_checkout_has_nothing_to_prove():
    assert wrong_tree(measured(None), {"tree": None}) is None


@pytest.mark.parametrize("place", ["rust/mstar_rust.abi3.so", ".venv/lib/python3.12/site-packages/mstar_rust/core.so"])
def test_an_extension_that_the_checkout_has_built_must_be_the_one_that_is_loaded(tree, place):
    module, built = tree / "mstar/__init__.py", tree / place
    elsewhere = "/usr/lib/python3/mstar_rust.abi3.so"
    # Without a build of its own, whatever is installed is right.
    assert wrong_tree(measured(module, mstar_rust=[elsewhere]), plan_of(tree)) is None
    built.parent.mkdir(parents=True)
    built.touch()
    assert own_build(tree, "mstar_rust") == built
    assert wrong_tree(measured(module, mstar_rust=[str(built)]), plan_of(tree)) is None
    assert wrong_tree(measured(module, mstar_rust=[]), plan_of(tree)) is None  # Python alone serves
    why = wrong_tree(measured(module, mstar_rust=[elsewhere]), plan_of(tree))
    assert f"has loaded {elsewhere} instead of the checkout's own {built}" in why
    unread = SimpleNamespace(module_file=str(module), native=None)
    assert "nothing tells where" in wrong_tree(unread, plan_of(tree))


def test_mapped_files_are_read_from_the_kernel(tmp_path):
    file = tmp_path / "a folder" / "toy_native.cpython-311.so"
    file.parent.mkdir()
    file.write_bytes(b"x" * 10)
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ):
        found = native_modules([os.getpid(), 2**22 + 1], ["toy_native", "other_native"])
    assert found == {"toy_native": [str(file)], "other_native": []}


def test_processes_that_cannot_be_looked_at_are_unknown_and_no_names_ask_nothing(tmp_path):
    assert native_modules([1], ["toy"], tmp_path) is None
    assert native_modules([1], [], tmp_path) == {}


def test_a_package_of_the_name_counts_and_a_name_that_only_begins_alike_does_not(tmp_path):
    maps = tmp_path / "7" / "maps"
    maps.parent.mkdir()
    line = "7f00-7f01 r-xp 00000000 08:01 42 "
    maps.write_text(f"{line}/t/toy.so\n{line}/t/toys.so\n7f00-7f01 rw-p 00000000 00:00 0 \n{line}/t/toy/part.so\n")
    assert native_modules([7], ["toy"], tmp_path) == {"toy": ["/t/toy.so", "/t/toy/part.so"]}
