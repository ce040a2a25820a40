"""Studies in a storage, for what only looks at them: a command opens its storage once and hands this on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.study_file.storage_address import StorageAddress

if TYPE_CHECKING:  # Optuna takes a second to load
    from optuna import Study
    from optuna.storages import BaseStorage


class StoredStudies:
    """Studies in one storage, which is opened when the first is looked up, and then once.

    A study that was found is handed out again; what it tells is always read anew.

    Attributes:
        address: Address of the storage.
        opened: Storage as it was opened; None before, and where there is none.
    """

    def __init__(self, address: StorageAddress) -> None:
        self.address = address
        self.opened: BaseStorage | None = None
        self._found: dict[str, Study] = {}

    def find(self, name: str) -> Study | None:
        """Return the study of that name, or None if there is none; looking for it never creates a database.

        Raises:
            ConfigError: The storage cannot be read; see `open_to_look`.
        """
        from tuner.storage.opening import find_in, open_to_look  # noqa: PLC0415 # it loads Optuna

        if self.opened is None:
            self.opened = open_to_look(self.address)
        if name not in self._found and self.opened is not None:
            study = find_in(self.opened, self.address, name)
            if study is None:
                return None
            self._found[name] = study
        return self._found.get(name)

    def look(self, name: str) -> Study | None:
        """Return the study of that name, without loading Optuna where there is no storage and no option to check.

        Raises:
            ConfigError: The storage cannot be read.
        """
        return self.find(name) if self.address.may_exist or self.address.has_options else None
