//! The headers of a WebSocket upgrade.

use http::{HeaderMap, header};

/// Whether the headers ask for a WebSocket. Source: `wsstream.IsWebSocketRequest` of `k8s.io/apimachinery`.
pub(crate) fn is_upgrade(headers: &HeaderMap) -> bool {
    words(headers, &header::UPGRADE).any(|word| word.eq_ignore_ascii_case("websocket"))
        && words(headers, &header::CONNECTION).any(|word| word.eq_ignore_ascii_case("upgrade"))
}

/// The protocols that the client offers.
pub(crate) fn protocols(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    words(headers, &header::SEC_WEBSOCKET_PROTOCOL)
}

/// The words of a header that is a list.
fn words<'a>(headers: &'a HeaderMap, name: &header::HeaderName) -> impl Iterator<Item = &'a str> + use<'a> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|word| !word.is_empty())
}
