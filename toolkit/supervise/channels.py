"""Post documents to the channels of [notify]. Errors never contain a URL or key, which are secrets."""

import getpass
import http.client
import json
import smtplib
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.message import EmailMessage
from typing import Any
from urllib.parse import unquote, urlsplit

from toolkit.errors import NotFoundError, OwnFailureError, ToolkitError
from toolkit.metrics.alert_rules import channels_of
from toolkit.supervise.log import say
from toolkit.supervise.secrets import read_reference, read_url

__all__ = ["POST_TIMEOUT_S", "post", "post_or_log"]

POST_TIMEOUT_S = 5.0
_PAGERDUTY_URL = "https://events.pagerduty.com/v2/enqueue"

Document = Mapping[str, Any]


def post(channel: str, document: Document, notify: Document, environ: Mapping[str, str]) -> None:
    """Post a document with at least `text` to a channel of `notify`.

    Raises:
        ToolkitError: it was not accepted.
    """
    kind, _, target = channels_of(notify).get(channel, "").partition(":")
    where = f"notify.{channel}" if channel == kind else f"notify.channels.{channel}"
    if not kind:
        known = ", ".join(channels_of(notify))
        raise NotFoundError(f"channel {channel!r} not found", where="notify.channels", fix=f"use one of {known}")
    try:
        read = read_url if kind in ("webhook", "slack") else read_reference
        server = read_reference(notify["smtp"], environ, "notify.smtp") if kind == "mail" else ""
        CHANNELS[kind](read(target, environ, where), document, {**notify, "smtp": server})
    except urllib.error.HTTPError as error:
        problem = f"HTTP {error.code}"
    except urllib.error.URLError as error:
        problem = getattr(error.reason, "strerror", None) or type(error.reason).__name__
    except ImportError:
        raise ToolkitError("apprise is not installed", where=where, fix="pip install 'toolkit[alerts]'") from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # their messages may contain the URL
        code = getattr(error, "smtp_code", "")
        problem = getattr(error, "strerror", None) or f"{type(error).__name__} {code}".strip()
    else:
        return
    raise OwnFailureError(
        f"{kind} did not accept it: {problem}",
        where=where,
        fix=f"`toolkit alerts test {channel} JOB` sends a test message",
    )


def post_or_log(channel: str, document: Document, notify: Document, environ: Mapping[str, str]) -> None:
    """Post a document; log why it was not accepted."""
    try:
        post(channel, document, notify, environ)
    except ToolkitError as error:
        say(f"cannot notify {channel}: {error}")


def _post_json(url: str, document: Document) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(document).encode(), headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=POST_TIMEOUT_S):
        return


def _pagerduty(secret: str, document: Document, notify: Document) -> None:
    *url, key = secret.split()  # a routing key, after the URL for another region
    summary, severity = document["text"][:1024], document.get("severity", "info")
    _post_json(url[0] if url else _PAGERDUTY_URL, {
        "routing_key": key, "event_action": "resolve" if document.get("state") == "resolved" else "trigger",
        "dedup_key": document.get("key", ""),
        "payload": {"summary": summary, "source": document["run_id"], "severity": severity, "custom_details": document},
    })  # fmt: skip


def _mail(addresses: str, document: Document, notify: Document) -> None:
    url, message = urlsplit(notify["smtp"]), EmailMessage()
    message["Subject"], message["To"] = " ".join(document["text"].split())[:200], addresses
    message["From"] = notify["mail_from"] or f"{getpass.getuser()}@{socket.getfqdn()}"
    message.set_content("\n".join(f"{name}: {value}" for name, value in document.items()))
    is_encrypted = url.scheme == "smtps"
    kind = smtplib.SMTP_SSL if is_encrypted else smtplib.SMTP
    with kind(url.hostname or "", url.port or (465 if is_encrypted else 25), timeout=POST_TIMEOUT_S) as connection:
        if url.username:
            if not is_encrypted:
                connection.starttls(context=ssl.create_default_context())
            connection.login(unquote(url.username), unquote(url.password or ""))
        connection.send_message(message)


def _apprise(url: str, document: Document, notify: Document) -> None:
    import apprise

    service = apprise.Apprise()
    if not service.add(url) or not service.notify(body=document["text"], title="toolkit"):
        raise ValueError  # apprise has logged the reason


CHANNELS: dict[str, Callable[[str, Document, Document], None]] = {
    "log": lambda nothing, document, notify: say(f"alert: {document['text']}"),
    "webhook": lambda url, document, notify: _post_json(url, document),
    "slack": lambda url, document, notify: _post_json(url, {"text": document["text"]}),
    "pagerduty": _pagerduty,
    "mail": _mail,
    "apprise": _apprise,
}
