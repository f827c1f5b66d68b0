"""Hydra finds our config group and primary config without a flag: appended, so verl's own files win on equal names.

verl's config comes too, so that a recipe with `--config-path` elsewhere can build on `mux_ppo_trainer`.
Imported right after `hydra` (see plugin.py), so that programs which import verl without Hydra do not pay for it.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin


class MuxSearchPath(SearchPathPlugin):
    """Adds `pkg://verl_mux.config` to every Hydra program in which verl is imported."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("verl_mux", "pkg://verl_mux.config")
        search_path.append("verl_mux", "pkg://verl.trainer.config")


Plugins.instance().register(MuxSearchPath)
