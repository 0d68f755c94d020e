//! The first event of a request: its user, its object and its client.

use std::net::IpAddr;

use coracle_audit::{Decision, Event, ObjectReference, UserInfo};
use http::{HeaderMap, HeaderValue, header};

use super::{AUDIT_ID, Received};
use crate::{authn::User, request::ResourceInfo};

/// Maximum bytes of an id that a client chooses, as upstream.
const MAX_ID: usize = 64;
/// Maximum bytes of a recorded user agent, as upstream.
const MAX_USER_AGENT: usize = 1024;
/// Maximum number of recorded client addresses.
const MAX_ADDRESSES: usize = 16;

/// The first event of a request.
pub(super) fn event(decision: &Decision, request: &Received<'_>) -> Event {
    let mut event = Event::received(decision.level, id(request.headers));
    event.request_uri = request.uri.path_and_query().map_or("", |all| all.as_str()).to_owned();
    request.info.verb.clone_into(&mut event.verb);
    event.user = request.user.map(user_info).unwrap_or_default();
    event.source_ips = addresses(request.headers, request.peer);
    event.user_agent = user_agent(request.headers);
    event.object_ref = request.info.resource.as_ref().map(reference);
    event
}

/// The id that the client chose, or a new id.
fn id(headers: &HeaderMap) -> String {
    let chosen = headers.get(AUDIT_ID).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match chosen {
        "" => uuid::Uuid::new_v4().to_string(),
        chosen => chosen[..chosen.len().min(MAX_ID)].to_owned(),
    }
}

/// The user agent of the client. Invalid UTF-8 is replaced, so that such a byte does not hide the agent.
fn user_agent(headers: &HeaderMap) -> String {
    let value = headers.get(header::USER_AGENT).map(HeaderValue::as_bytes).unwrap_or_default();
    match value.get(..MAX_USER_AGENT) {
        Some(start) if value.len() > MAX_USER_AGENT => {
            format!("{}...TRUNCATED", String::from_utf8_lossy(start))
        }
        _ => String::from_utf8_lossy(value).into_owned(),
    }
}

/// The addresses in `X-Forwarded-For`, then the address of the connection.
fn addresses(headers: &HeaderMap, peer: Option<IpAddr>) -> Vec<String> {
    let forwarded = headers.get("x-forwarded-for").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let forwarded = forwarded.split(',').filter_map(|one| one.trim().parse::<IpAddr>().ok());
    let mut all: Vec<IpAddr> = forwarded.take(MAX_ADDRESSES).collect();
    if let Some(peer) = peer.filter(|peer| all.last() != Some(peer)) {
        all.push(peer);
    }
    all.iter().map(IpAddr::to_string).collect()
}

/// The user as events have it.
pub(super) fn user_info(user: &User) -> UserInfo {
    UserInfo {
        username: user.name.clone(),
        uid: user.uid.clone(),
        groups: user.groups.clone(),
        extra: user.extra.clone(),
    }
}

fn reference(resource: &ResourceInfo) -> ObjectReference {
    ObjectReference {
        resource: resource.resource.clone(),
        namespace: resource.namespace.clone(),
        name: resource.name.clone(),
        api_group: resource.group.clone(),
        api_version: resource.version.clone(),
        subresource: resource.subresource.clone(),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_agent_with_other_bytes_than_ascii_is_recorded() {
        let of = |agent: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(header::USER_AGENT, HeaderValue::from_bytes(agent).unwrap());
            user_agent(&headers)
        };
        assert_eq!(user_agent(&HeaderMap::new()), "");
        assert_eq!(of(b"curl/8"), "curl/8");
        assert_eq!(of("curl/ü".as_bytes()), "curl/ü");
        assert_eq!(of(b"curl/\xff"), "curl/\u{fffd}");
        // The limit is inside a character.
        let long = of("ü".repeat(MAX_USER_AGENT).replacen('ü', "x", 1).as_bytes());
        assert!(long.starts_with("xü") && long.ends_with("\u{fffd}...TRUNCATED"), "{long}");
    }
}
