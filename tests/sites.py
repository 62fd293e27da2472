"""The committed configuration on its GPU sites, pinned as somebody who runs it would."""

from pathlib import Path

from assay.config import HuggingFaceSource, load

FOLDER = Path(__file__).parents[1] / "config"
SITES = sorted(path.stem for path in (FOLDER / "sites").glob("*.yaml"))
DIGEST = f"sha256:{'ab' * 32}"


def on(site, **settings):
    """The committed configuration on another site."""
    return load({"site": site, **settings}, FOLDER)


def pinned(config):
    """`config` with every image and every weight pinned."""
    arms = {}
    for name, arm in config.arms.items():
        devices = {
            kind: device.model_copy(
                update={"image": device.image and device.image.model_copy(update={"digest": DIGEST})}
            )
            for kind, device in arm.devices.items()
        }
        arms[name] = arm.model_copy(update={"devices": devices})
    sources = {
        name: source.model_copy(update={"revision": "0" * 40, "files": dict.fromkeys(source.files, "0" * 64)})
        if isinstance(source, HuggingFaceSource)
        else source
        for name, source in config.sources.items()
    }
    return config.model_copy(update={"arms": arms, "sources": sources})


def checkouts(tmp_path):
    """A folder for each tree that an arm is served from."""
    for name in ("head", "base"):
        (tmp_path / name).mkdir(parents=True)
    return {name: str(tmp_path / name) for name in ("head", "base")}
