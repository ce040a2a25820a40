"""Pages of a study served by `meshtune dashboard` in a separate process, and requests to them."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager

from tests.support.studies.command_line import environment


class Served:
    """Study with a running dashboard."""

    def __init__(self, told, folder):
        self.url, self.page, self.folder = told["url"], told["study_url"].removesuffix("/note"), folder
        self.id = int(self.page.rpartition("/")[2])

    def ask(self, path, method="GET", body=None):
        """Send a request, and return status and content of the answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310 # our own server
            f"{self.url}{path}", data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 # as above
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def study(self):
        """Return the data of the study's pages."""
        status, content = self.ask(f"api/studies/{self.id}")
        assert status == 200, content
        return json.loads(content)

    def trial(self, number):
        """Return the data of one trial."""
        return next(trial for trial in self.study()["trials"] if trial["number"] == number)

    def put_note(self, version, body, trial_id=""):
        """Save a note as the page's editor does."""
        path = "/".join(filter(None, (f"api/studies/{self.id}", str(trial_id), "note")))
        return self.ask(path, "PUT", {"version": version, "body": body})[0]


@contextmanager
def serving(file, *options):
    """Run the command, and end it with Ctrl-C's signal."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tuner", "dashboard", str(file), "--port", "0", "--json", *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        told = ""
        while not told.endswith("}\n"):
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            told += line
        yield process, Served(json.loads(told), file.parent)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
