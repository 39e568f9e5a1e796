"""The table of tiles that ``fusedmoe tune`` measured on this machine: JSON in the cache directory.

    {"format": 2, "gpus": {<name of a GPU>: {<coarse shape>: {"config": <name>, "ms": <time>, "measured": <date>}}}}

A coarse shape is `choice.Problem.coarse`, its parts joined by ``/``. The file is in the folder of this version of
fusedmoe, like the compiled kernels, because another version may have other tiles. A name that is not a candidate is
ignored. So a wrong file can only make kernels slow.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

from fusedmoe.kernels.build import cache
from fusedmoe.kernels.sm90.tiles.measured import Coarse
from fusedmoe.version import __version__

logger = logging.getLogger(__name__)

FILE = "tuned_sm90.json"
FORMAT = 2
DECIMAL = re.compile(r"[0-9]{1,18}")


def path() -> Path | None:
    """Return the path of the table, existing or not; None if the cache on disk is switched off.

    Raises `fusedmoe.kernels.build.cache.CacheUnusableError`: the cache directory cannot be used.
    """
    folder = cache.folder(__version__)
    return None if folder is None else folder / FILE


@functools.cache
def table() -> dict[Coarse, str]:
    """Return the measurements of this GPU: the configuration's name by coarse shape. The file is read once.

    The GPU is torch's current one at the first call. A damaged file counts as missing, with one WARNING.
    """
    try:
        file = path()
    except cache.CacheUnusableError:  # the compiler reports it
        return {}
    if file is None:
        return {}
    try:
        gpus = _read(file)
    except cache.DamagedError as error:
        logger.warning("%s is not used: %s; `fusedmoe tune --clear` removes it", file, error)
        return {}
    of_gpu = gpus.get(gpu_name() or "", {}) if gpus else {}
    return {_coarse(shape): entry["config"] for shape, entry in of_gpu.items()}


def gpu_name() -> str | None:
    """Return the name of torch's current GPU; None without a GPU."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def add(file: Path, gpu: str, shape: Coarse, config: str, ms: float) -> None:
    """Add one measurement to the table. A damaged table is replaced.

    Raises `OSError`: the directory cannot be written.
    """
    try:
        gpus = _read(file)
    except cache.DamagedError:
        gpus = {}
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    of_gpu = gpus.setdefault(gpu, {})
    of_gpu["/".join(map(str, shape))] = {"config": config, "ms": round(ms, 5), "measured": today}
    file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, "gpus": gpus}, indent=2, sort_keys=True)
    cache.replace(file, text.encode() + b"\n")


def _read(file: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the GPUs of the table; none if there is no table.

    Raises `fusedmoe.kernels.build.cache.DamagedError`: the content is not a table of this format.
    """
    found = cache.read(file, cache.LARGEST_JSON)
    if found is None:
        return {}
    content = cache.parsed(found, "the table")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise cache.DamagedError(f"not a table of format {FORMAT}")
    gpus = content.get("gpus")
    if not isinstance(gpus, dict) or not all(isinstance(shapes, dict) for shapes in gpus.values()):
        raise cache.DamagedError("no entries by GPU and shape")
    for shape, entry in (item for shapes in gpus.values() for item in shapes.items()):
        if not isinstance(entry, dict) or not isinstance(entry.get("config"), str):
            raise cache.DamagedError(f"{shape[:100]!r} has no configuration")
        _coarse(shape)
    return gpus


def _coarse(shape: str) -> Coarse:
    family, *numbers = shape.split("/")
    if len(numbers) != 3 or not all(DECIMAL.fullmatch(number) for number in numbers):
        raise cache.DamagedError(f"{shape[:100]!r} is not a shape")
    rows, columns, depth = map(int, numbers)
    return family, rows, columns, depth
