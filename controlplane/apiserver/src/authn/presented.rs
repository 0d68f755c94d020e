//! Reads the credential of a request: the header `Authorization`, or a token among the protocols of a WebSocket.
//! Browsers cannot set headers of a WebSocket.
//!
//! Source of the WebSocket protocol: `k8s.io/apiserver/pkg/authentication/request/websocket`.

use std::borrow::Cow;

use base64::{
    Engine as _,
    prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD},
};
use http::{HeaderMap, HeaderValue, header};

use crate::web_socket;

/// Prefix of the protocol that contains a token.
const TOKEN_PROTOCOL: &str = "base64url.bearer.authorization.k8s.io.";

/// The credential of the headers.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Presented<'a> {
    Nothing,
    Bearer(Cow<'a, str>),
    /// `user:password`.
    Basic(Vec<u8>),
    /// Another scheme, or a malformed value.
    Invalid,
}

/// Reads the headers.
pub(super) fn read(headers: &HeaderMap) -> Presented<'_> {
    let Some(header) = headers.get(header::AUTHORIZATION) else { return of_web_socket(headers) };
    let Some((scheme, value)) = header.to_str().ok().and_then(|text| text.split_once(' ')) else {
        return Presented::Invalid;
    };
    let value = value.trim();
    if scheme.eq_ignore_ascii_case("bearer") && !value.is_empty() {
        return Presented::Bearer(value.into());
    }
    let decoded = scheme.eq_ignore_ascii_case("basic").then(|| BASE64_STANDARD.decode(value).ok()).flatten();
    match decoded {
        Some(decoded) if decoded.contains(&b':') => Presented::Basic(decoded),
        _ => Presented::Invalid,
    }
}

/// The token among the protocols of a WebSocket. As upstream, the client must offer a second protocol, which the server
/// can accept.
fn of_web_socket(headers: &HeaderMap) -> Presented<'_> {
    if !web_socket::is_upgrade(headers) {
        return Presented::Nothing;
    }
    let (tokens, others): (Vec<&str>, Vec<&str>) =
        web_socket::protocols(headers).partition(|protocol| protocol.starts_with(TOKEN_PROTOCOL));
    let [token] = tokens[..] else {
        return if tokens.is_empty() { Presented::Nothing } else { Presented::Invalid };
    };
    let decoded = BASE64_URL_SAFE_NO_PAD.decode(&token[TOKEN_PROTOCOL.len()..]).ok();
    let decoded = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
    match decoded.filter(|token| !token.is_empty() && !others.is_empty()) {
        Some(token) => Presented::Bearer(token.into()),
        None => Presented::Invalid,
    }
}

/// Removes the token from the protocols of a WebSocket, so that it is not forwarded to another server.
pub(crate) fn remove_token(headers: &mut HeaderMap) {
    let name = header::SEC_WEBSOCKET_PROTOCOL;
    let has_token = |value: &HeaderValue| {
        value.as_bytes().windows(TOKEN_PROTOCOL.len()).any(|part| part == TOKEN_PROTOCOL.as_bytes())
    };
    if !headers.get_all(&name).iter().any(has_token) {
        return;
    }
    let kept = web_socket::protocols(headers).filter(|protocol| !protocol.starts_with(TOKEN_PROTOCOL));
    let kept = HeaderValue::from_str(&kept.collect::<Vec<_>>().join(", "));
    headers.remove(&name);
    if let Ok(kept) = kept
        && !kept.is_empty()
        && !has_token(&kept)
    {
        headers.insert(name, kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_has_a_token_or_a_password() {
        for (header, expect) in [
            ("Bearer abc", Presented::Bearer("abc".into())),
            ("bearer  abc ", Presented::Bearer("abc".into())),
            ("Basic YW5uOnA6cQ==", Presented::Basic(b"ann:p:q".to_vec())),
            ("BASIC Og==", Presented::Basic(b":".to_vec())),
            ("Basic YW5u", Presented::Invalid),
            ("Basic !", Presented::Invalid),
            ("Basic ", Presented::Invalid),
            ("Bearer ", Presented::Invalid),
            ("Digest abc", Presented::Invalid),
            ("abc", Presented::Invalid),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, header.parse().unwrap());
            assert_eq!(read(&headers), expect, "{header}");
        }
        assert_eq!(read(&HeaderMap::new()), Presented::Nothing);
    }

    /// The headers of a WebSocket with these protocols, one header for each protocol.
    fn upgrade(protocols: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONNECTION, HeaderValue::from_static("keep-alive, Upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
        for protocol in protocols {
            headers.append(header::SEC_WEBSOCKET_PROTOCOL, protocol.parse().unwrap());
        }
        headers
    }

    #[test]
    fn a_web_socket_has_its_token_in_a_protocol_that_no_backend_gets() {
        let token = &*format!("{TOKEN_PROTOCOL}YWJj");
        let both = format!("v5.channel.k8s.io, {token}");
        for protocols in [&["a", token, "b"][..], &[both.as_str()]] {
            let mut headers = upgrade(protocols);
            assert_eq!(read(&headers), Presented::Bearer("abc".into()), "{protocols:?}");
            remove_token(&mut headers);
            let left: Vec<_> = web_socket::protocols(&headers).collect();
            assert!(!left.is_empty() && left.iter().all(|protocol| !protocol.starts_with("base64url")));
        }
        for (protocols, expect) in [
            (&["a"][..], Presented::Nothing),
            (&[token], Presented::Invalid),
            (&["a", token, token], Presented::Invalid),
            (&["a", TOKEN_PROTOCOL], Presented::Invalid),
            (&["a", "base64url.bearer.authorization.k8s.io._w"], Presented::Invalid),
        ] {
            assert_eq!(read(&upgrade(protocols)), expect, "{protocols:?}");
        }
        let mut headers = upgrade(&["a", token]);
        headers.remove(header::UPGRADE);
        assert_eq!(read(&headers), Presented::Nothing);
        headers.insert(header::AUTHORIZATION, HeaderValue::from_static("Bearer x"));
        assert_eq!(read(&headers), Presented::Bearer("x".into()));
    }
}
