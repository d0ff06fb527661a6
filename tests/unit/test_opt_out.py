"""X-Robots-Tag headers as servers send them."""

from __future__ import annotations

from email.message import Message

import pytest

from data_prep.download_config import GuardConfig
from data_prep.fetching.guard import check_response
from data_prep.reasons import FetchError


def opted_out(*lines, name="X-Robots-Tag", **guard):
    """Whether a response with these headers is refused for them."""
    headers = Message()
    for line in lines:
        headers.add_header(name, line)
    try:
        check_response("http://x.org", headers, GuardConfig(**guard))
    except FetchError as error:
        return error.reason == "opted out"
    return False


OPT_OUTS: list[str | tuple[str, ...]] = [
    "noai", "NoImageAI", "none", "nofollow, noindex", "noindex, unavailable_after: 25 Jun 2077 15:00:00 GMT",
    "unavailable_after: 25 Jun 2077 15:00:00 GMT, noai", "unavailable_after: Fri, 25 Jun 2077 15:00:00 GMT, noai",
    "unavailable_after: Fri, 25 Jun 2010 15:00:00 GMT", "unavailable_after: 25 Jun 2010 15:00:00 PST",
    "unavailable_after: 2010-06-25T15:00:00Z", "max-image-preview:large, noai", "max-snippet:-1,noimageindex",
    "noai;noindex", " , ,noai,", "*: noai", "NeuCLIP: NOAI", "neuclip/1.0: noai", "otherbot: nofollow, neuclip: noai",
    "otherbot: nofollow, *: none", "neuclip: unavailable_after: 25 Jun 2010 15:00:00 GMT",
    ("googlebot: nofollow", "noimageai"), "unavailable_after: 25 Jun 2010",
    "unavailable_after: 2010-06-25 15:00:00 UTC", "unavailable_after: Jun 25, 2010, nofollow",
    "unavailable_after: Friday, 25-Jun-10 15:00:00 UTC", "noindex nofollow", "noindex:", "noai: true, nofollow",
    '"noai"', "'noindex', nofollow", "noai=1", "[noai]", "nofollow|noimageai", "{none}", '"neuclip: noai"',
    "X-Robots-Tag: noai", "nofollow: true, noai", "robots: noai", "*:nofollow:noai", "noarchive: noindex",
    "\xe2\x80\x9cnoai\xe2\x80\x9d", "no-ai", "unavailable-after: 25 Jun 2077, noai", "Unavailable-After: 25 Jun 2010",
    "max_snippet: 20, noai", "nofollow, No_Image-AI", "no-index: true, nofollow", "ｎｏａｉ",
    "ｎｏａｉ".encode().decode("latin-1"), "X_Robots_Tag: noai",
]  # fmt: skip
OTHERS: list[str | tuple[str, ...]] = [
    (), "all", "index, follow", "nofollow", "otherbot: noai", "otherbot: noindex, nofollow", '"otherbot: noindex"',
    "noarchive=1, noairplay", "otherbot: none, max-snippet: 20, noai",
    "otherbot: unavailable_after: 25 Jun 2010 15:00:00 GMT", "googlebot: max-image-preview: large, noindex",
    "max-image-preview: none", "max_image_preview: none", "unavailable_after: Fri, 25 Jun 2077 15:00:00 GMT, nofollow",
    "unavailable_after: some day", "unavailable_after: Jun 25, 2077", "unavailable_after: 25 Jun 2077, index",
    "otherbot: unavailable_after: 2010-06-25 15:00:00 UTC",
]  # fmt: skip


def test_which_headers_opt_out():
    for rows, expected in ((OPT_OUTS, True), (OTHERS, False)):
        for lines in rows:
            assert opted_out(*([lines] if isinstance(lines, str) else lines)) == expected, lines


def test_only_configured_directives_are_honored():
    assert not opted_out("noindex", opt_outs=("noai",))
    assert not opted_out("noai, none", opt_outs=())
    assert opted_out("mybot: noai", user_agent="MyBot")


def test_misspelt_names_of_the_header_opt_out_and_others_do_not():
    for name in ("X_Robots_Tag", "x-robots_tag", "Robots-Tag", "ROBOTS", "X-Robots", "X-RobotsTag"):
        assert opted_out("nofollow, noai", name=name)
        assert not opted_out("otherbot: noai", name=name)
        if "tag" in name.lower():
            headers = Message()
            headers.add_header("Server", f"apache\x85{name}: noai")
            with pytest.raises(FetchError, match="bad headers"):
                check_response("http://x.org", headers, GuardConfig())
    for name in ("X-Robots-Tagged-By", "Robot", "X-Frame-Options", "Tag", "ETag"):
        assert not opted_out("noai", name=name)
