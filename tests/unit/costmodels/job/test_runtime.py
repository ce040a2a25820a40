import re

import pytest

from costmodels.job.runtime import catalog_path, read_profile
from hardware.io.errors import ConfigError


@pytest.mark.parametrize("key", ["zero_stages", "recompute"])
def test_profile_offers_at_least_one_choice(tmp_path, key):
    """A profile whose framework offers no ZeRO stage or no way to recompute is refused by the key."""
    text = re.sub(rf"\b{key}: \[[^\]]*\]", f"{key}: []", catalog_path("megatron-core").read_text(encoding="utf-8"))
    (tmp_path / "own.yaml").write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=f"{key} = \\[\\]"):
        read_profile(tmp_path / "own.yaml")
