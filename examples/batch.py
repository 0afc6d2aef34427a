"""Answer a file of requests in OpenAI's batch format: `python examples/batch.py IN OUT [URL]`.

Lines that share a prefix follow each other, and find it cached. Answers are appended as they come; a 4xx is an answer.
After a kill the same command goes on. Lines that failed for `--retry-s` (408, 429, a 5xx or nothing) are left to it.
"""

import argparse
import fcntl
import json
import math
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

ID_START = '{"id":"batch_req_'
PROMPT_FIELDS = ("model", "cache_salt", "tools", "system", "instructions", "messages", "prompt", "input")


def read_requests(path):
    """Return the lines by `custom_id`, all of them checked."""
    lines = {}
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
                if not line["url"].startswith("/v1/") or line["body"].get("stream") or line["custom_id"] in lines:
                    raise ValueError("a url without /v1/, a stream, or the custom_id of an earlier line")
                lines[line["custom_id"]] = line
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                sys.exit(f"{path}, line {number} is no request: {error!r}")
    return lines


def read_answers(file):
    """Return the `custom_id`s that have an answer, and cut off a last line that a kill has torn."""
    file.seek(0)
    found, size = set(), 0
    for text in file:
        if text.endswith(b"\n") and text.startswith(ID_START.encode()):
            found.add(json.loads(text)["custom_id"])
            size += len(text)
        elif text.endswith(b"\n") or not ID_START.encode().startswith(text[: len(ID_START)]):
            sys.exit(f"{file.name} has other lines than answers")
    file.truncate(size)
    return found


def in_order(lines):
    """Sort lines by their prompts, with the fields in the order in which templates write them."""
    return sorted(lines, key=lambda line: [line["url"], *(json.dumps(line["body"].get(f)) for f in PROMPT_FIELDS)])


class NoRedirect(HTTPRedirectHandler):
    """The key and the requests go to the given address only."""

    def redirect_request(self, *_):
        return None


def send(request, opener=build_opener(NoRedirect)):  # noqa: B008 (one for all)
    """Return status, headers and body. The status is 0 where no answer came, and the body is then the reason."""
    try:
        with opener.open(request, timeout=600) as response:
            status, headers, text = response.status, response.headers, response.read()
    except HTTPError as error:
        status, headers, text = error.code, error.headers, error.read()
    except (OSError, HTTPException) as error:
        return 0, {}, repr(error)
    try:
        return status, headers, json.loads(text)
    except ValueError:
        return status, headers, text[:200]


class Batch:
    """One run: threads take lines, and append what comes back."""

    def __init__(self, options, lines, file):
        self.options, self.file = options, file
        # Several stretches of the order at a time, so that a fleet has several prefixes to spread over its workers.
        size = math.ceil(len(lines) / round(math.sqrt(options.concurrency)))
        self.stretches = [lines[at : at + size][::-1] for at in range(0, len(lines), size)]
        self.lock = threading.Lock()
        self.answered_s = time.monotonic()
        self.num_answered = 0
        self.problem = ""  # of every line

    def work(self, number):
        """Answer lines until none is left."""
        while not self.problem:
            with self.lock:
                stretch = self.stretches[number % len(self.stretches)] or max(self.stretches, key=len)
                if not stretch:
                    return
                line = stretch.pop()
            response = self.answer(line)
            if response is None:
                continue
            with self.lock:
                self.num_answered += 1
                answer = {"id": f"batch_req_{os.urandom(16).hex()}", "custom_id": line["custom_id"]}
                answer |= {"response": response, "error": None}
                self.file.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
                self.file.flush()

    def answer(self, line):
        """Return the response to a line, or None."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.options.key}"}
        request = Request(self.options.url + line["url"], json.dumps(line["body"]).encode(), headers)
        started_s, wait_s = time.monotonic(), 0.5
        while not self.problem:
            status, headers, body = send(request)
            if status:
                self.answered_s = time.monotonic()
            if status and status < 500 and status not in (408, 429):
                if status == 401 or not isinstance(body, dict):
                    self.problem = f"{request.full_url} answered {status}: {str(body)[:200]}: check URL and the key"
                    return None
                return {"status_code": status, "request_id": headers.get("x-request-id", ""), "body": body}
            retry_after = headers.get("retry-after", "")
            wait_s = max(min(2 * wait_s, 30.0), float(retry_after) if retry_after.isdecimal() else 0.0)
            if time.monotonic() + wait_s - started_s > self.options.retry_s or headers.get("x-should-retry") == "false":
                print(f"no answer to {line['custom_id']}: {status} {str(body)[:200]}", file=sys.stderr)
                if not status and self.answered_s < started_s:  # nor to any other line
                    self.problem = f"{self.options.url} does not answer"
                return None
            time.sleep(wait_s)
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("requests", metavar="IN")
    parser.add_argument("answers", metavar="OUT")
    parser.add_argument("url", nargs="?", default=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--retry-s", type=float, default=600.0)
    options = parser.parse_args()
    options.url, options.key = options.url.removesuffix("/v1"), os.environ.get("OPENAI_API_KEY", "unused")
    lines = read_requests(options.requests)
    with open(options.answers, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one run at a time
        done = read_answers(file)
        rest = [line for custom_id, line in lines.items() if custom_id not in done]
        batch = Batch(options, in_order(rest), file)
        if rest:
            with ThreadPoolExecutor(options.concurrency) as pool:
                try:
                    list(pool.map(batch.work, range(options.concurrency)))
                except KeyboardInterrupt:
                    batch.problem = "stopped"
    print(f"{len(done) + batch.num_answered} of {len(lines)} lines have an answer ({len(done)} from before)")
    return batch.problem or int(len(done) + batch.num_answered < len(lines))


if __name__ == "__main__":
    sys.exit(main())
