//! URLs as Go's package `net/url` parses them.
//!
//! Functions and formats of Kubernetes return the parts of a URL as written. A default port, an empty path and the case
//! of the host are kept. The crate `url` implements the URL Standard of browsers, which changes these parts.

use std::net::Ipv6Addr;

/// Maximum number of parameters of a query. All parameters of a longer query are ignored, as in Go.
const MAX_PARAMETERS: usize = 10_000;

/// An absolute URL, or an absolute path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GoUrl {
    scheme: String,
    /// The rest of a URL without a slash after the scheme, such as `mailto:a@b`.
    opaque: String,
    user: Option<String>,
    /// Host and port.
    host: String,
    has_authority: bool,
    /// The escaped path.
    path: String,
    /// The escaped query, without the question mark.
    query: String,
    /// Whether the URL ends with a question mark.
    has_empty_query: bool,
    /// The escaped fragment.
    fragment: String,
}

/// A section of a URL. Each has its own set of characters that need no escape.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Section {
    User,
    Host,
    /// The zone of an IPv6 address.
    Zone,
    Path,
    Query,
    Fragment,
}

// === impl GoUrl ===

impl GoUrl {
    /// Parses an absolute URL or an absolute path.
    ///
    /// # Errors
    /// The text is not an absolute URL or an absolute path. The message is the same as in Go.
    pub fn parse(text: &str) -> Result<GoUrl, String> {
        GoUrl::check(text)?;
        let (before, fragment) = text.split_once('#').unwrap_or((text, ""));
        let mut url = parse(before, false).map_err(|reason| failure(before, &reason))?;
        url.fragment = escaped(fragment, Section::Fragment).map_err(|reason| failure(text, &reason))?;
        Ok(url)
    }

    /// Checks that a text is an absolute URL or an absolute path (`url.ParseRequestURI`).
    ///
    /// # Errors
    /// The text is not an absolute URL or an absolute path. The message is the same as in Go.
    pub fn check(text: &str) -> Result<(), String> {
        parse(text, true).map(drop).map_err(|reason| failure(text, &reason))
    }

    /// The scheme in lower case. Empty if there is none.
    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// Host and port, as written.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The host, without the brackets of an IPv6 address.
    pub fn hostname(&self) -> &str {
        let name = self.split_host().0;
        name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name)
    }

    /// The port. Empty if there is none.
    pub fn port(&self) -> &str {
        self.split_host().1
    }

    fn split_host(&self) -> (&str, &str) {
        let parts = self.host.rsplit_once(':').filter(|(_, port)| is_number(port));
        parts.unwrap_or((&self.host, ""))
    }

    /// The path, escaped.
    pub fn escaped_path(&self) -> &str {
        &self.path
    }

    /// The query, escaped.
    pub fn raw_query(&self) -> &str {
        &self.query
    }

    /// Bytes of all parts.
    pub(crate) fn size(&self) -> usize {
        let parts = [&self.scheme, &self.opaque, &self.host, &self.path, &self.query, &self.fragment];
        parts.into_iter().chain(&self.user).map(String::len).sum()
    }

    /// Names and values of the query, unescaped. Invalid parameters are omitted.
    pub fn parameters(&self) -> impl Iterator<Item = (String, String)> {
        let pairs = self.query.split('&');
        let is_short = pairs.clone().nth(MAX_PARAMETERS).is_none();
        pairs
            .filter(move |pair| is_short && !pair.is_empty() && !pair.contains(';'))
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
            .filter_map(|(name, value)| Some((unescaped_query(name)?, unescaped_query(value)?)))
    }
}

fn unescaped_query(text: &str) -> Option<String> {
    unescape(text, Section::Query).ok().map(to_text)
}

fn failure(text: &str, reason: &str) -> String {
    format!("parse {text:?}: {reason}")
}

fn to_text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// Parses a URL without fragment. If `is_request`, relative paths are invalid.
fn parse(text: &str, is_request: bool) -> Result<GoUrl, String> {
    if text.bytes().any(|byte| byte.is_ascii_control()) {
        return Err("net/url: invalid control character in URL".to_owned());
    }
    if text.is_empty() && is_request {
        return Err("empty url".to_owned());
    }
    let mut url = GoUrl::default();
    if text == "*" {
        url.path = text.to_owned();
        return Ok(url);
    }
    let (scheme, rest) = split_scheme(text)?;
    url.scheme = scheme.to_ascii_lowercase();
    let (mut rest, query) = match rest.split_once('?') {
        Some((rest, query)) => (rest, Some(query)),
        None => (rest, None),
    };
    url.has_empty_query = query == Some("");
    url.query = query.unwrap_or_default().to_owned();
    if !rest.starts_with('/') {
        if !url.scheme.is_empty() {
            url.opaque = rest.to_owned();
            return Ok(url);
        }
        if is_request {
            return Err("invalid URI for request".to_owned());
        }
        if rest.split('/').next().is_some_and(|segment| segment.contains(':')) {
            return Err("first path segment in URL cannot contain colon".to_owned());
        }
    }
    let may_have_authority = !url.scheme.is_empty() || (!is_request && !rest.starts_with("///"));
    if let Some(after) = rest.strip_prefix("//").filter(|_| may_have_authority) {
        let (authority, path) = after.split_at(after.find('/').unwrap_or(after.len()));
        (url.user, url.host) = parse_authority(&url.scheme, authority)?;
        url.has_authority = true;
        rest = path;
    }
    url.path = escaped(rest, Section::Path)?;
    Ok(url)
}

/// Splits a text into the scheme, which may be empty, and the rest.
fn split_scheme(text: &str) -> Result<(&str, &str), String> {
    let is_part = |at: usize, byte: u8| {
        byte.is_ascii_alphabetic() || (at > 0 && (byte.is_ascii_digit() || b"+-.".contains(&byte)))
    };
    let end = text.bytes().enumerate().find(|(at, byte)| !is_part(*at, *byte));
    match end {
        Some((0, b':')) => Err("missing protocol scheme".to_owned()),
        Some((_, b':')) => Ok(text.split_once(':').unwrap_or(("", text))),
        _ => Ok(("", text)),
    }
}

fn parse_authority(scheme: &str, text: &str) -> Result<(Option<String>, String), String> {
    let Some((user, host)) = text.rsplit_once('@') else { return Ok((None, parse_host(scheme, text)?)) };
    let host = parse_host(scheme, host)?;
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:~!$&'()*+,;=%@".contains(&byte);
    if !user.bytes().all(is_valid) {
        return Err("net/url: invalid userinfo".to_owned());
    }
    unescape(user, Section::User)?;
    Ok((Some(user.to_owned()), host))
}

/// Checks a host with its port, and unescapes it.
fn parse_host(scheme: &str, host: &str) -> Result<String, String> {
    match host.rfind('[') {
        Some(0) => return parse_literal(host),
        Some(_) => return Err("invalid IP-literal".to_owned()),
        None => {}
    }
    // Other schemes than HTTP may have several hosts with ports, so only the last port is checked.
    let colon = if matches!(scheme, "http" | "https") { host.find(':') } else { host.rfind(':') };
    if let Some(at) = colon {
        check_port(host.split_at(at).1)?;
    }
    unescape(host, Section::Host).map(to_text)
}

/// Checks an IPv6 address in brackets with its port, and unescapes its zone.
fn parse_literal(host: &str) -> Result<String, String> {
    let inside = host.strip_prefix('[').and_then(|rest| rest.rsplit_once(']'));
    let Some((address, port)) = inside else { return Err("missing ']' in host".to_owned()) };
    check_port(port)?;
    let (address, zone) = address.split_at(address.find("%25").unwrap_or(address.len()));
    let address = to_text(unescape(address, Section::Host)?);
    let zone = to_text(unescape(zone, Section::Zone)?);
    if address.parse::<std::net::Ipv4Addr>().is_ok() {
        return Err("invalid IP-literal".to_owned());
    }
    if address.parse::<Ipv6Addr>().is_err() || zone == "%" {
        return Err(format!("invalid host: ParseAddr({address:?}): unable to parse IP"));
    }
    Ok(format!("[{address}{zone}]{port}"))
}

fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Checks a port with its colon. Both may be absent, and a port may be empty.
fn check_port(text: &str) -> Result<(), String> {
    match text.strip_prefix(':') {
        Some(port) if is_number(port) => Ok(()),
        None if text.is_empty() => Ok(()),
        _ => Err(format!("invalid port {text:?} after host")),
    }
}

/// The section as written, if it is valid. Otherwise it is escaped where necessary.
fn escaped(text: &str, section: Section) -> Result<String, String> {
    let bytes = unescape(text, section)?;
    let is_valid = |byte: u8| b"!$&'()*+,;=:@[]%".contains(&byte) || !needs_escape(byte, section);
    if text.bytes().all(is_valid) {
        return Ok(text.to_owned());
    }
    let mut made = String::with_capacity(text.len());
    for byte in bytes {
        if needs_escape(byte, section) {
            made.push_str(&format!("%{byte:02X}"));
        } else {
            made.push(char::from(byte));
        }
    }
    Ok(made)
}

fn needs_escape(byte: u8, section: Section) -> bool {
    let plain: &[u8] = match section {
        Section::Host | Section::Zone => b"!$&'()*+,;=:[]<>\"",
        Section::Path => b"$&+,/:;=@",
        Section::Fragment => b"$&+,/:;=?@!()*",
        Section::User | Section::Query => b"",
    };
    !(byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) || plain.contains(&byte))
}

fn unescape(text: &str, section: Section) -> Result<Vec<u8>, String> {
    let mut made = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        match *first {
            b'%' => {
                let value = match after {
                    [high, low, ..] => unhex(*high).zip(unhex(*low)).map(|(high, low)| high << 4 | low),
                    _ => None,
                };
                let Some(value) = value.filter(|value| may_be_escaped(*value, section)) else {
                    let escape = rest.get(..3).unwrap_or(rest);
                    return Err(format!("invalid URL escape {:?}", String::from_utf8_lossy(escape)));
                };
                made.push(value);
                rest = after.get(2..).unwrap_or_default();
                continue;
            }
            b'+' if section == Section::Query => made.push(b' '),
            byte if matches!(section, Section::Host | Section::Zone)
                && byte.is_ascii()
                && needs_escape(byte, section) =>
            {
                let shown = char::from(byte).to_string();
                return Err(format!("invalid character {shown:?} in host name"));
            }
            byte => made.push(byte),
        }
        rest = after;
    }
    Ok(made)
}

/// Whether a byte may be escaped. In hosts, only non-ASCII bytes and the percent sign may be escaped: `%25` begins a
/// zone.
fn may_be_escaped(byte: u8, section: Section) -> bool {
    match section {
        Section::Host => !byte.is_ascii() || byte == b'%',
        Section::Zone => matches!(byte, b'%' | b' ') || !needs_escape(byte, Section::Host),
        _ => true,
    }
}

fn unhex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// URLs with the host and path that Go 1.26 returns.
    #[test]
    fn parts_equal_gos_parts() {
        for (text, host, path) in [
            ("https://Example.com:443", "Example.com:443", ""),
            ("https://example.com:80/", "example.com:80", "/"),
            ("http://[::1]:80/a b", "[::1]:80", "/a%20b"),
            ("HTTP://U:p@H/%7Ea?", "H", "/%7Ea"),
            ("mailto:a@b", "", ""),
            ("/path", "", "/path"),
            ("//host/a", "host", "/a"),
            ("*", "", "*"),
            ("x://a:1:2/", "a:1:2", "/"),
            ("http://[fe80::1%25en0]/", "[fe80::1%en0]", "/"),
            ("http://e.com/é?q=%C3%A9+b;c", "e.com", "/%C3%A9"),
            ("http://a/[x]#f%20g", "a", "/[x]"),
        ] {
            let url = GoUrl::parse(text).unwrap();
            assert_eq!((url.host(), url.escaped_path()), (host, path), "{text}");
        }
        let url = GoUrl::parse("http://[::1]:80/?x=1&x=%32+3&y&&z;=4&%zz=5#x=6").unwrap();
        assert_eq!((url.scheme(), url.hostname(), url.port()), ("http", "::1", "80"));
        let pairs: Vec<_> = url.parameters().collect();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(pairs, [pair("x", "1"), pair("x", "2 3"), pair("y", "")]);
        let long = GoUrl::parse(&format!("/?{}", "a&".repeat(MAX_PARAMETERS))).unwrap();
        assert_eq!(long.parameters().count(), 0);
    }

    #[test]
    fn invalid_urls_have_the_messages_of_go() {
        for (text, expected) in [
            ("", "empty url"),
            ("a/b", "invalid URI for request"),
            (":a", "missing protocol scheme"),
            ("https://a:b", r#"invalid port ":b" after host"#),
            ("http://a:1:2/", r#"invalid port ":1:2" after host"#),
            ("http://a b/", r#"invalid character " " in host name"#),
            ("http://a/%zz", r#"invalid URL escape "%zz""#),
            ("http://%41/", r#"invalid URL escape "%41""#),
            ("http://a/%4", r#"invalid URL escape "%4""#),
            ("http://[1.2.3.4]/", "invalid IP-literal"),
            ("http://[::1/", "missing ']' in host"),
            ("http://a\u{7f}/", "net/url: invalid control character in URL"),
        ] {
            assert_eq!(GoUrl::parse(text).unwrap_err(), format!("parse {text:?}: {expected}"));
            assert!(GoUrl::check(text).is_err(), "{text}");
        }
    }

    #[test]
    fn urls_are_equal_if_they_are_written_the_same() {
        let url = |text: &str| GoUrl::parse(text).unwrap();
        assert_eq!(url("HTTPS://a/b c"), url("https://a/b%20c"));
        for other in ["https://a/", "https://a:443", "https://a?", "https://u@a"] {
            assert_ne!(url("https://a"), url(other), "{other}");
        }
    }
}
