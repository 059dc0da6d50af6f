"""A certificate authority for one test session, made with the openssl command."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_CONFIG = """
[ca]
default_ca = authority
[authority]
dir = {folder}
database = {folder}/index
serial = {folder}/serial
new_certs_dir = {folder}
default_md = sha256
policy = anything
unique_subject = no
copy_extensions = copy
[anything]
commonName = supplied
"""


@dataclass(frozen=True)
class Certificate:
    certificate: Path
    key: Path


class Authority:
    """``ca_file`` vouches for what ``issue`` makes for 127.0.0.1; skips the test where openssl is missing."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("the openssl command is not installed")
        self._folder = folder
        self._config = folder / "ca.conf"
        self._config.write_text(_CONFIG.format(folder=folder))
        (folder / "index").touch()
        (folder / "serial").write_text("01\n")
        self.ca_file = folder / "ca.pem"
        self._key = folder / "ca.key"
        self._openssl("req", "-x509", *_new_key(self._key), "-out", self.ca_file, "-days", "2", "-subj", "/CN=tests")

    def issue(self, name: str, *, is_expired: bool = False) -> Certificate:
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request = self._folder / f"{name}.csr"
        alternative = ("-addext", "subjectAltName=IP:127.0.0.1")
        self._openssl("req", *_new_key(made.key), "-out", request, "-subj", f"/CN={name}", *alternative)
        dates = ("-startdate", "20200101000000Z", "-enddate", "20210101000000Z") if is_expired else ("-days", "2")
        signing = ("-config", self._config, "-cert", self.ca_file, "-keyfile", self._key, "-batch", "-notext")
        self._openssl("ca", *signing, "-in", request, "-out", made.certificate, *dates)
        return made

    def _openssl(self, *arguments: str | Path) -> None:
        done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def _new_key(path: Path) -> tuple[str | Path, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path)
