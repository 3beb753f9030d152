"""What may be put into exported files: selectors, addresses, data sources."""

from langchain_quota.monitoring.checks import datasource_fault, selector_fault, url_fault

GOOD_SELECTORS = [
    'job="agents"',
    'job = "agents" , namespace=~"prod|test"',
    'job!~"a.*",cluster!="b"',
    r'job=~"a\\.b"',
    r'job="quo\"te"',
    'job="{}, =ü"',
]
BAD_SELECTORS = [
    "",
    "agents",
    "job=agents",
    "job='agents'",
    '{job="agents"}',
    'job="agents"}',
    'job="agents",',
    'job="agents" or vector(1)',
    'job="agents"} or up{job="b"',
    'job="agents',
    r'job="agents\"',
    r'job=~"a\.b"',
    'job="a\nb"',
    'job=~"("',
    'job=="a"',
    '1job="a"',
    'agent="researcher"',
    'job="agents",thread_id="ann"',
    '__name__="up"',
    " ",
]

BAD_ADDRESSES = [
    "",
    "example.org",
    "ftp://example.org",
    "javascript:alert(1)",
    "https://",
    "https:///path",
    "https://example.org/{{ $labels.job }}",
    "https://example.org/'quoted'",
    "https://example.org/?orgId=1",
    "https://example.org/#top",
    "https://user:secret@example.org",
    "https://example.org/a b",
    "https://example.org/\n",
    "https://example.org:port/",
    "https://[::1/",
]


def test_good_selectors() -> None:
    """Matchers as PromQL has them between braces are taken."""
    assert {text: selector_fault(text) for text in GOOD_SELECTORS} == dict.fromkeys(GOOD_SELECTORS)


def test_bad_selectors() -> None:
    """What would break the rules, or match no metric that lacks the label, is refused in words."""
    faults = {text: selector_fault(text) or "taken" for text in BAD_SELECTORS}
    assert [text for text, fault in faults.items() if not fault.startswith("must ")] == []
    assert faults["agents"].endswith("not 'agents'")
    assert "must name labels that the scrape adds" in faults['job="agents",thread_id="ann"']


def test_bad_addresses() -> None:
    """One to which no path can be appended, that has a secret or would end a text is refused."""
    assert {text: url_fault(text) for text in BAD_ADDRESSES} == {
        text: f"must be an http or https address without query, fragment or user, not {text!r}"
        for text in BAD_ADDRESSES
    }


def test_data_sources() -> None:
    """A data source's UID is one that Grafana can have; another is refused in words."""
    for uid in ("prom-1", "P_x", "a" * 40):
        assert datasource_fault(uid) is None
    for text in ("", "a b", "${x}", 'a"', "a\n", "a" * 41):
        fault = datasource_fault(text)
        assert fault == f"must be 1 to 40 letters, digits, - and _, not {text!r}"
