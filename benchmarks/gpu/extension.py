"""Puts rota._C in place for this Python: from a pack made elsewhere where it fits, else built.

    make gpu-pack    # on any machine with nvcc
    make gpu         # on the one with the GPU; its first step is this

A pack saves the minutes of a build on a machine that is lent for a few. It is a folder that travels
with the working tree: the extension, and what it was built from and for. It fits where all of that
is the same and the extension can be imported, which the C library of an older system prevents.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import machine
from arguments import Parser
from gpu import facts

ROOT = machine.REPOSITORY
PACK = ROOT / "build" / "gpu-pack"
ABOUT = "pack.json"
# The extension of this Python, where `import rota` finds it in the working tree.
EXTENSION = ROOT / "python" / "rota" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
MAX_PACK_BYTES = 64 << 20


def needs(archs: str) -> dict[str, str]:
    """What a pack must have been built from and for, to be used here; `archs` as in
    ROTA_CUDA_ARCHS."""
    import torch  # here, since a run imports this module and uses no torch

    digest = hashlib.sha256()
    for path in [ROOT / "setup.py", *sorted((ROOT / "csrc").rglob("*"))]:
        if path.is_file() and path.suffix != ".md":
            content = path.read_bytes()
            digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    return {
        "extension": EXTENSION.name,  # names the version of Python and the processor
        "torch": torch.__version__,
        "archs": archs,
        "sources": digest.hexdigest()[:16],
    }


def take_pack(archs: str) -> str | None:
    """Puts the pack's extension in place; returns None, or why it cannot."""
    if not (PACK / ABOUT).exists():
        return f"there is no {PACK.relative_to(ROOT)}"
    made = json.loads((PACK / ABOUT).read_text())
    for name, here in needs(archs).items():
        if made.get(name) != here:
            return f"the pack's {name} is {made.get(name)}, here {here}"
    EXTENSION.unlink(missing_ok=True)  # this process's peers may have mapped it
    shutil.copyfile(PACK / EXTENSION.name, EXTENSION)
    command = [sys.executable, "-c", "import rota"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    tried = subprocess.run(command, env=env, capture_output=True, text=True)
    if tried.returncode != 0:
        EXTENSION.unlink()
        return f"the pack cannot be imported here: {(tried.stderr.splitlines() or ['?'])[-1]}"
    return None


def build(archs: str, *options: str) -> None:
    """Runs setup.py; raises CalledProcessError."""
    command = [sys.executable, "setup.py", "build_ext", *options]
    env = {**os.environ, "ROTA_CUDA": "1", "ROTA_CUDA_ARCHS": archs}
    env.setdefault("MAX_JOBS", str(machine.num_cores()))
    # Appended, so that a ninja installed beside this Python is found if there is no other.
    env["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    nvcc = facts.find_tool("nvcc")
    if nvcc is not None and not (env.get("CUDA_HOME") or env.get("CUDA_PATH")):
        env["CUDA_HOME"] = str(Path(nvcc).parents[1])  # setup.py looks on PATH alone
    subprocess.run(command, cwd=ROOT, env=env, check=True)


def make_pack(archs: str) -> None:
    """Builds the pack, with its description last."""
    shutil.rmtree(PACK, ignore_errors=True)
    library = ROOT / "build" / "cuda" / "gpu-pack"
    build(archs, "--build-lib", str(library))
    PACK.mkdir(parents=True)
    shutil.copyfile(library / "rota" / EXTENSION.name, PACK / EXTENSION.name)
    num_bytes = (PACK / EXTENSION.name).stat().st_size
    if num_bytes > MAX_PACK_BYTES:
        sys.exit(f"rota: the pack has {num_bytes} bytes, expected at most {MAX_PACK_BYTES}")
    made = {**needs(archs), "git_commit": machine.git_commit()}
    (PACK / ABOUT).write_text(json.dumps(made, indent=1) + "\n")
    print(f"{PACK.relative_to(ROOT)}: {num_bytes / 1e6:.1f} MB, {made}")


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--archs", required=True, help="ROTA_CUDA_ARCHS, such as shipped:9.0")
    parser.add_argument("--pack", action="store_true", help="make a pack; put nothing in place")
    args = parser.parse_args()
    if args.pack:
        make_pack(args.archs)
        return 0
    reason = take_pack(args.archs)
    if reason is None:
        print(f"took {PACK.relative_to(ROOT)}")
        return 0
    print(f"building, since {reason}", flush=True)
    try:
        build(args.archs, "--inplace")
    except subprocess.CalledProcessError as error:
        return error.returncode
    print(f"built, since {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
