"""The `assay` command: reading, checking and comparing what the workflow wrote. Running things is Snakemake's part."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from assay import config
from assay.errors import AssayError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
# Nothing printed here is markup, whatever brackets and colons it holds.
console = Console(highlight=False, markup=False, emoji=False)
errors = Console(stderr=True, highlight=False, markup=False, emoji=False)

VerdictFile = Annotated[Path, typer.Argument(help="A file under results/verdicts/", show_default=False)]


def say(line: str) -> None:
    """Print one line as it is, however long."""
    console.print(line, soft_wrap=True)


def read_config(folder: Path) -> config.Config:
    """The configuration under `folder`, at the site that its config.yaml names."""
    path = folder / "config.yaml"
    settings = config.parse(dict[str, Any], config.read_yaml(path) or {}, str(path))
    return config.load(settings, folder)


@app.command()
def explain(
    verdict: VerdictFile,
    brief: Annotated[bool, typer.Option(help="Only the verdict, its reason and caveats")] = False,
    items: Annotated[int, typer.Option(min=0, help="How many of the worst items to show")] = 5,
) -> None:
    """Print a verdict for a person: gates, controls, and the worst items with the text around each divergence."""
    from assay.explain import explain as show

    show(verdict, console, brief, items)


@app.command()
def verify(verdict: VerdictFile) -> None:
    """Recompute a verdict from its stored scores; exit 1 on any difference."""
    from assay.verdict import verify as recompute

    differences = recompute(verdict)
    if differences:
        raise AssayError(f"{verdict} is not what its scores give:\n  " + "\n  ".join(map(str, differences)))
    say(f"{verdict}: recomputed from its stored scores, no difference")


@app.command()
def diff(
    a: VerdictFile, b: VerdictFile, items: Annotated[int, typer.Option(min=0, help="Item changes to print")] = 20
) -> None:
    """Say what changed between two verdicts, gate by gate and item by item."""
    from assay.diff import diff as compare

    gates, changes = compare(a, b)
    table = Table()
    for heading in ("what", str(a), str(b)):
        table.add_column(heading, overflow="fold")
    for change in [*gates, *changes[:items]]:
        table.add_row(change.what, change.before or "absent", change.after or "absent")
    console.print(table if table.row_count else "no difference")
    if len(changes) > items:
        say(f"and {len(changes) - items} more item scores (--items {len(changes)} shows all)")


@app.command()
def status(
    verdict: VerdictFile, strict: Annotated[bool, typer.Option(help="Exit 5 on a pass with caveats")] = False
) -> None:
    """Print a verdict's status and exit with its code, for scripts."""
    from assay.gate import exit_code, read_verdict

    found = read_verdict(verdict).verdict
    say(found.value)
    raise typer.Exit(exit_code(found, strict))


@app.command()
def cases(file: Annotated[Path, typer.Argument(help="Metric vectors, JSON", show_default=False)]) -> None:
    """Run metric vectors against the library, one line each; exit 1 on any wrong value."""
    from assay.cases import run_cases

    results = run_cases(file)
    for result in results:
        say(str(result))
    wrong = [result for result in results if result.wrong]
    if wrong:
        raise AssayError(f"{len(wrong)} of {len(results)} cases are wrong")


@app.command()
def facts(
    arm: Annotated[str, typer.Argument(metavar="ARM", help="An arm of config/arms/", show_default=False)],
    log: Annotated[Path, typer.Argument(metavar="LOGFILE", help="What its server printed", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Every fact, as JSON")] = False,
    folder: Annotated[Path, typer.Option(help="Configuration directory")] = Path("config"),
) -> None:
    """Read what a server log says was asked for and picked; exit 1 on an execution provider that was not asked for."""
    from assay.engines.facts import read_log, require_logged_provider, resolve

    rules = read_config(folder).rules_of(arm)
    if not rules:
        errors.print(f"arm '{arm}' has no `log_rules`, so nothing can be read but lines that may tell something")
    found = read_log(log, rules)
    if as_json:
        say(json.dumps(found.as_json(), indent=2, ensure_ascii=False))
    else:
        table = Table("what", "the log says")
        for statement in resolve(found.facts, rules.values()):
            table.add_row(statement.question, str(statement))
        console.print(table)
        if found.unmatched:
            say("no rule reads:")
        for item in found.unmatched:
            say(f"  line {item.line}{f' (x {item.count})' if item.count > 1 else ''}: {item.text}")
    require_logged_provider(found.facts)


@app.command()
def configs(
    tree: Annotated[Path, typer.Option(help="Directory of deployment files", show_default=False)],
    folder: Annotated[Path, typer.Option(help="Configuration directory")] = Path("config"),
) -> None:
    """Compare the map in config/configs.yaml with a directory of deployment files; exit 1 on any gap."""
    from assay.coverage import compare_tree

    gaps = compare_tree(read_config(folder).configs, tree)
    if gaps:
        raise AssayError("\n".join(gaps))
    say("every deployment is mapped, and every mapped deployment is there")


@app.command()
def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Everything known, each value with its source")] = False,
    sysfs_root: Annotated[str | None, typer.Option(help="Instead of the site's", show_default=False)] = None,
    proc_root: Annotated[str | None, typer.Option(help="Instead of the site's", show_default=False)] = None,
    site: Annotated[str | None, typer.Option(help="A site; the one in config.yaml by default")] = None,
    folder: Annotated[Path, typer.Option(help="Configuration directory")] = Path("config"),
) -> None:
    """List the accelerators of this machine: which is which, who is on them, which are free. Exit 1 if none."""
    from assay.devices import discovery, show
    from assay.devices.model import Vendor

    chosen = config.read_site(folder, site)
    roots = {"sysfs_root": sysfs_root, "proc_root": proc_root}
    options = (chosen.devices or config.DeviceOptions()).model_copy(
        update={name: root for name, root in roots.items() if root is not None}
    )
    node = (
        discovery.discover_any(options)
        if chosen.device == "cpu"
        else discovery.discover(Vendor(chosen.device), options)
    )
    if as_json:
        console.print_json(data=show.as_json(node, options.limits, os.environ))
        return
    console.print(show.as_table(node, options.limits, os.environ))
    for source, state in node.sources.items():
        say(f"{source}: {state}")
    if warning := show.warning(node, os.environ):
        say(f"Nothing can be leased: {warning}")


@app.command()
def lock(
    name: Annotated[str, typer.Argument(metavar="SET", help="A recipe under samplesets/", show_default=False)],
    folder: Annotated[Path, typer.Option(help="Where recipes and locks lie")] = Path("samplesets"),
    resources: Annotated[Path, typer.Option(help="Where the fetched sources lie")] = Path("resources"),
) -> None:
    """Build a sample set from its fetched sources and make the result its lock, to be reviewed and committed."""
    from assay.samples.build import write_lock
    from assay.samples.lock import lock_path, read_lock

    path = lock_path(name, folder)
    before = read_lock(name, folder).items if path.exists() else {}
    after = write_lock(name, folder, resources).items
    kept = before.keys() & after.keys()
    changed = sum(before[item] != after[item] for item in kept)
    say(
        f"{path}: {len(after)} items ({len(after) - len(kept)} added, {len(before) - len(kept)} removed, "
        f"{changed} changed)"
    )


@app.command()
def schemas(folder: Annotated[Path, typer.Option(help="Where to write")] = Path("config/schemas")) -> None:
    """Write the JSON Schemas of the configuration files, the sample set recipes and the verdict."""
    from assay.samples.recipe import recipe_schema
    from assay.store import write_text
    from assay.verdicts.model import verdict_schema

    kinds = {**config.json_schemas(), "sampleset": recipe_schema(), "verdict": verdict_schema()}
    for name, schema in kinds.items():
        write_text(folder / f"{name}.schema.yaml", config.schema_text(schema))


def main() -> None:
    """Entry point: a user's mistake is one message on stderr and exit status 1."""
    try:
        app(standalone_mode=True)
    except AssayError as error:
        errors.print(str(error), soft_wrap=True)
        raise SystemExit(1) from None
