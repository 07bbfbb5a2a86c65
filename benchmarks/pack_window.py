"""Pack what a borrowed machine without network needs, and print the commands to run on it.

    python benchmarks/pack_window.py [--model FILE.gguf --spider DIR] [--have FILE]
                                     [--limit-mib 62]

Without a model, the commands measure with random weights. With one, they train it.

The machine takes a limited number of bytes with each command. So the model is cut into parts, which
are joined there and checked by digest. The first command also carries the data and the wheels that
the machine lacks: `--have` lists the packages that it has, one a line. Everything is written to
`runs/window`, which git ignores. Commands on the machine run in the repository's root.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from window.parts import DATA, MANIFEST, WHEELS, commands, drop_repeated_embedding, write_parts

ROOT = Path(__file__).parents[1]
FOLDER = "runs/window"
PYTHON, JAX = "3.12", "0.11.2"
# What tokamax imports; its other requirements are those of a profiler that is not used. JAX 0.11.2
# needs this flax.
TOKAMAX = (
    *("tokamax==0.0.17", "flax==0.12.12", "qwix==0.1.8", "einshape==1.0", "fire==0.7.1"),
    *("immutabledict==4.3.1", "termcolor==3.3.0", "xprof==2.24.2"),
)
PLATFORMS = (
    *("manylinux_2_34", "manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_24"),
    *("manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux2010", "manylinux1"),
)
SITE = f"export PYTHONPATH=$PWD/{FOLDER}/site"
INSTALL = (
    "python3 -m pip install -q --no-index --no-deps --no-compile --upgrade "
    f"--target {FOLDER}/site {FOLDER}/{WHEELS}/*.whl"
)


def names_of(lines: Iterable[str]) -> set[str]:
    """Return the normalized names in lines such as `a_b==1.0`, without comments."""
    names = (re.match(r"[\w.-]+", line.strip()) for line in lines)
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in names if name}


def missing_requirements(have: set[str], extras: Sequence[str]) -> list[str]:
    """Return `name==version` of what the project with these extras needs and the machine lacks."""
    with tempfile.TemporaryDirectory() as folder:
        pins = (ROOT / "requirements.txt").read_text().splitlines()
        pins = [pin for pin in pins if not pin.startswith(("jax=", "jaxlib="))]
        pins += [f"jax=={JAX}", f"jaxlib=={JAX}"]
        (constraints := Path(folder) / "constraints.txt").write_text("\n".join(pins) + "\n")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "setup.py"]
        command += [word for extra in extras for word in ("--extra", extra)]
        command += ["--no-header", "--no-annotate", "-c", str(constraints)]
        command += ["--python-version", PYTHON, "--python-platform", "x86_64-manylinux_2_28"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    needed = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return [line for line in needed if not names_of([line]) <= have]


def download(requirements: list[str], target: Path) -> None:
    """Download a wheel of each requirement for the machine's Python."""
    target.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(target)]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    command += [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    subprocess.run([*command, *requirements], check=True)


def tree_bytes() -> int:
    """Return the size of the files that travel with every command."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(listed, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    paths = [ROOT / name for name in done.stdout.split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measuring() -> list[str]:
    """Return the commands that measure, in order."""
    parts = (("decode", "9"), ("engine", "9.5"), ("update", "9.5"))  # the first one installs
    measure = f"{SITE}; python3 benchmarks/accelerator.py --out $OUT --part"
    first, *others = (f"{measure} {part} --minutes {minutes}" for part, minutes in parts)
    return [f"{INSTALL} && {first}", *others]


def training() -> list[str]:
    """Return the commands that train after the last part of the model has arrived, in order."""
    learn = f"{SITE}; python3 benchmarks/accelerator.py --part learn --out $OUT --minutes"
    return [f"{INSTALL} && {learn} 7", f"{learn} 9.5", f"{learn} 9.5 --finish"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="GGUF file to train")
    parser.add_argument("--spider", type=Path, help="directory of the data set")
    default = Path(__file__).parent / "window/machine_packages.txt"
    parser.add_argument("--have", type=Path, default=default, help="packages of the machine")
    parser.add_argument("--limit-mib", type=float, default=62, help="of one command")
    args = parser.parse_args()
    if (args.model is None) != (args.spider is None):
        parser.error("--model and --spider go together; pass both or neither")
    for path in filter(None, (args.model, args.spider, args.have)):
        if not path.exists():
            parser.error(f"{path} does not exist; check the path")
    target = ROOT / FOLDER
    for name in (DATA, WHEELS):
        shutil.rmtree(target / name, ignore_errors=True)
    for part in target.glob("part[0-9][0-9]"):
        part.unlink()
    _collect_wheels(args, target / WHEELS)
    free = int(args.limit_mib * 2**20) - tree_bytes()
    if args.model is None:
        if size_of(target / WHEELS) > free:
            sys.exit("the wheels are too large for the first command; raise --limit-mib")
        print("\n".join(commands([], [f"{FOLDER}/{WHEELS}"], FOLDER, measuring())))
        return
    parts = _split(args, target, free)
    carried = [f"{FOLDER}/{name}" for name in (MANIFEST, DATA, WHEELS)]
    print("\n".join(commands(parts, carried, FOLDER, training())))


def _collect_wheels(args: argparse.Namespace, target: Path) -> None:
    """Download what the machine lacks for training, or without a model for measuring."""
    have = names_of(x for x in args.have.read_text().splitlines() if not x.startswith("#"))
    try:
        if args.model is not None:
            missing = missing_requirements(have, ("spider",))
        else:
            replaced = names_of(TOKAMAX)
            missing = [x for x in missing_requirements(have, ()) if not names_of([x]) <= replaced]
            missing += TOKAMAX
        if missing:
            download(missing, target)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd[1:4])} failed, see above; run it in the environment of make")


def _split(args: argparse.Namespace, target: Path, free: int) -> list[Path]:
    """Copy the data to `target` and cut the model into parts there, of `free` bytes at most."""
    shutil.copytree(args.spider, target / DATA)
    (target / DATA).chmod(0o755)  # the source may be read-only
    first = free - size_of(target / DATA) - size_of(target / WHEELS) - 2**16
    if first <= 0:
        sys.exit("the first command has no room for a part of the model; raise --limit-mib")
    with tempfile.TemporaryDirectory() as folder:
        drop_repeated_embedding(args.model, model := Path(folder) / "model.gguf")
        return write_parts(model, target, first=first, size=free)


if __name__ == "__main__":
    main()
