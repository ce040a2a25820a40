#!/usr/bin/env bash
# PyTorch 2.13.0, Python 3.11, Linux, CPU: a view of a fake tensor refills the storage that `resize_(0)` freed.
#
# FSDP and DDP free gathered weights by `untyped_storage().resize_(0)` and keep the tensor; fake tensors follow, so that
# storages tell the memory of a step without a device. A view leaves the size of a storage as it is. But FakeTensorMode
# caches what operators return (`cache_enabled`, on by default): the second time that the same view is taken, its result is
# made from the cache, and that sets the storage up again, with as many bytes as the view needs. Whoever counts bytes of
# storages under fake tensors finds freed weights alive. The first view, and any with the cache off, does not do that.
#
# Seen, for a view of 16 bytes that ends 32 bytes into a freed storage:
#   cache on: 0 bytes before the view, 32 after
#   cache off: 0 bytes before the view, 0 after
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cat > "$folder/freed.py" <<'PROGRAM'
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

for is_on in (True, False):
    with FakeTensorMode() as mode:
        mode.cache_enabled = is_on
        weights = torch.empty(24)
        storage = weights.untyped_storage()
        weights[4:8]
        storage.resize_(0)
        before = storage.nbytes()
        weights[4:8]
        print(f"cache {'on' if is_on else 'off'}: {before} bytes before the view, {storage.nbytes()} after")
PROGRAM
seen=$("$folder/venv/bin/python" "$folder/freed.py" 2>/dev/null)
echo "$seen"
diff - <(echo "$seen") <<'EXPECTED'
cache on: 0 bytes before the view, 32 after
cache off: 0 bytes before the view, 0 after
EXPECTED
