"""Write the golden vectors that are not there yet: `python scripts/write_vectors.py`. Never touches one that is."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import msgspec

from sglang_pd.protocol import codec

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    samples = importlib.import_module("protocol.message_samples")
    folder = ROOT / "tests" / "vectors" / f"v{codec.PROTOCOL_VERSION.major}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, message in samples.SAMPLES.items():
        target = folder / f"{name}.bin"
        if target.exists():
            continue
        target.write_bytes(codec.encode(message, epoch=samples.EPOCH))
        twin = msgspec.json.format(msgspec.json.encode(message), indent=2) + b"\n"
        target.with_suffix(".json").write_bytes(twin)
        print(f"wrote {target.relative_to(ROOT)} and its JSON twin")


if __name__ == "__main__":
    main()
