//! Forwards a client's request to an aggregated server.

use std::{net::IpAddr, sync::Arc};

use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use percent_encoding::percent_decode_str;

use crate::{
    aggregation::{Remote, openapi},
    audit::AUDIT_ID,
    authn::User,
    client_upgrade::ClientUpgrade,
    error::{ApiError, Result},
    pretty::Forwarded,
    reply::{self, Body, Reply},
    request::RequestInfo,
    request_body::set_length,
    state::State,
    sub::{
        proxy::forwarded,
        stream::{check_switch, is_redirect, join, pass},
    },
};

/// The header with the addresses of the client and of proxies.
const FORWARDED_FOR: &str = "x-forwarded-for";

/// A request to forward.
pub(crate) struct ForwardedRequest<'a> {
    pub(crate) user: &'a User,
    pub(crate) info: &'a RequestInfo,
    pub(crate) method: &'a Method,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) body: Body,
    /// Address of the client. `None` for callers in this process.
    pub(crate) peer: Option<IpAddr>,
    /// The id of the audit event.
    pub(crate) audit_id: Option<String>,
}

/// The server for a request. `None` if this server answers the request itself.
pub(crate) fn server_of(state: &State, info: &RequestInfo) -> Option<Arc<Remote>> {
    let remote = state.remotes.find(&info.path)?;
    let is_ours = state.registry.load().group_version(&remote.group, &remote.version).is_some()
        || (info.path.starts_with("/openapi/") && openapi::has_converted_v3(&remote));
    (!is_ours).then_some(remote)
}

/// Forwards a request, whose body is a stream, and streams the response to the client. Supports upgrades.
pub(crate) async fn run(
    state: &State,
    remote: &Remote,
    arrived: ForwardedRequest<'_>,
    client: ClientUpgrade,
) -> Result<Reply> {
    if !remote.is_available() {
        return Err(ApiError::unavailable("service unavailable"));
    }
    let (info, query) = (arrived.info, &arrived.info.query.raw);
    let mark = if query.is_empty() { "" } else { "?" };
    let uri = format!("{}{mark}{query}", path_to_forward(info)?);
    let request = Request::builder().method(arrived.method.clone()).uri(uri).body(arrived.body);
    let mut request = request.map_err(|error| ApiError::bad_request(error.to_string()))?;
    *request.headers_mut() = forwarded(arrived.headers, &info.path);
    add_client(request.headers_mut(), arrived.peer, arrived.audit_id.as_deref());
    set_length(&mut request);
    let permit = state.in_flight.proxied(arrived.user)?;
    let answer = state.forwarder().send(remote, arrived.user, request, permit).await?;
    respond(arrived.headers, answer, |server| join(client, server, state.shutdown.clone()))
}

/// The path for the aggregated server. As upstream, an encoded slash is sent as a slash, so that each server splits the
/// path as authorization does. The path after `proxy/` keeps its encoding.
fn path_to_forward(info: &RequestInfo) -> Result<String> {
    let rest = info.resource.as_ref().and_then(|resource| resource.proxy_path.as_deref()).unwrap_or_default();
    let base = info.path.strip_suffix(rest).unwrap_or(&info.path).replace("%2F", "/").replace("%2f", "/");
    if has_dot_segments(&info.path) || has_empty_segments(&base) {
        return Err(ApiError::bad_request(
            "a path with an empty segment, `.` or `..` cannot be forwarded to an aggregated server",
        ));
    }
    Ok(base + rest)
}

/// Whether a path has an empty segment before another segment. Authorization reads an empty segment as an empty name. A
/// server that ignores it would read the next segment as the name.
fn has_empty_segments(path: &str) -> bool {
    path.trim_end_matches('/').contains("//")
}

/// Whether a path has a segment `.` or `..`, also in percent-encoding. Authorization reads such a segment as a name; a
/// server that resolves the path would serve another namespace or resource.
fn has_dot_segments(path: &str) -> bool {
    let decoded = percent_decode_str(path).decode_utf8_lossy();
    decoded.split(['/', '\\']).any(|segment| matches!(segment, "." | ".."))
}

/// Adds the address of the client and the id of the audit event, as upstream. With the id, an administrator finds the
/// audit events of both servers for one request. Sources: `AppendForwardedForHeader` of `k8s.io/apimachinery`,
/// `NewRequestForProxy` of `k8s.io/apiserver`.
fn add_client(headers: &mut HeaderMap, peer: Option<IpAddr>, audit_id: Option<&str>) {
    if let Some(peer) = peer {
        let all = headers.get_all(FORWARDED_FOR).iter().filter_map(|value| value.to_str().ok());
        let all: Vec<&str> = all.filter(|value| !value.is_empty()).collect();
        let all = all.into_iter().map(str::to_owned).chain([peer.to_string()]).collect::<Vec<_>>().join(", ");
        if let Ok(all) = HeaderValue::from_str(&all) {
            headers.insert(FORWARDED_FOR, all);
        }
    }
    if let Some(id) = audit_id.and_then(|id| HeaderValue::from_str(id).ok()) {
        headers.insert(AUDIT_ID, id);
    }
}

/// The reply to the client for a server's response. Calls `switch` if the server switches the protocol.
///
/// # Errors
/// The server switches the protocol, but the client has not asked for it.
fn respond(
    asked: &HeaderMap,
    mut answer: Response<Incoming>,
    switch: impl FnOnce(OnUpgrade),
) -> Result<Reply> {
    check_switch(asked, answer.status())?;
    // A client that follows the redirect would send its credentials to an address that the server chose
    // (CVE-2022-3172).
    if is_redirect(&answer) {
        return Ok(reply::text(
            502,
            "the backend attempted to redirect this request, which is not permitted",
        ));
    }
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        switch(hyper::upgrade::on(&mut answer));
    }
    let mut reply = pass(answer);
    reply.extensions_mut().insert(Forwarded);
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::header;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::target::exchange;

    /// The reply to the client for a response with this head and no body.
    async fn reply_to(head: &str) -> Reply {
        let (ours, mut theirs) = tokio::io::duplex(1 << 12);
        let server = async {
            // A response before the request is an error of the protocol.
            assert_ne!(theirs.read(&mut [0; 1 << 10]).await.unwrap(), 0);
            theirs.write_all(head.as_bytes()).await.unwrap();
        };
        let request = Request::get("/apis/far.io/v1").header("Host", "a").body(reply::full("")).unwrap();
        let exchanged = exchange(ours, request, "a", Duration::from_secs(60));
        let (answer, ()) = tokio::join!(exchanged, server);
        respond(&HeaderMap::new(), answer.unwrap(), |_server| panic!("a switch of protocols")).unwrap()
    }

    #[test]
    fn a_path_that_a_server_could_resolve_to_another_namespace_is_refused() {
        for path in
            ["/apis/far.io/v1/namespaces/a/../b/things", "/apis/far.io/v1/%2e%2E/x", "/apis/a/v1/b%2F.."]
        {
            assert!(has_dot_segments(path), "{path}");
        }
        for path in
            ["/apis/far.io/v1beta1/namespaces/a/pods/*/http..rate", "/apis/far.io/v1/", "/apis/a/v1/...%2F"]
        {
            assert!(!has_dot_segments(path), "{path}");
        }
    }

    #[test]
    fn a_server_splits_the_path_as_authorization_does() {
        let sent = |uri: &str| {
            let info = RequestInfo::parse(&Method::GET, &uri.parse().unwrap());
            path_to_forward(&info).map_err(|error| error.code)
        };
        for (uri, expected) in [
            ("/apis/far.io/v1/things/a%2Fstatus", "/apis/far.io/v1/things/a/status"),
            ("/apis/far.io/v1/things%2fa/?b=%2F", "/apis/far.io/v1/things/a/"),
            ("/apis/far.io/v1/things/a%252Fb%3F", "/apis/far.io/v1/things/a%252Fb%3F"),
            ("/apis/far.io/v1/things/a%2Fproxy/b%2F/c//d", "/apis/far.io/v1/things/a/proxy/b%2F/c//d"),
            ("/apis/far.io/v1/things//", "/apis/far.io/v1/things//"),
        ] {
            assert_eq!(sent(uri).as_deref(), Ok(expected), "{uri}");
        }
        for uri in [
            "/apis/far.io/v1/things//status",
            "/apis/far.io/v1/things/%2Fstatus",
            "/apis/far.io/v1//namespaces/x/things",
            "//apis/far.io/v1/things",
            "/apis/far.io/v1/things//a/proxy/b",
            "/apis/far.io/v1/things/a/proxy/../b",
        ] {
            assert_eq!(sent(uri), Err(400), "{uri}");
        }
    }

    #[test]
    fn a_server_gets_the_address_of_the_client_and_the_id_of_the_audit_event() {
        let mut headers = HeaderMap::new();
        add_client(&mut headers, None, None);
        assert!(headers.is_empty());
        add_client(&mut headers, "10.0.0.7".parse().ok(), Some("ours"));
        assert_eq!(headers[FORWARDED_FOR], "10.0.0.7");
        assert_eq!(headers[AUDIT_ID], "ours");
        // The client can choose the first addresses only.
        let mut headers = HeaderMap::new();
        headers.append(FORWARDED_FOR, HeaderValue::from_static("1.1.1.1"));
        headers.append(FORWARDED_FOR, HeaderValue::from_static("2.2.2.2"));
        add_client(&mut headers, "fd00::7".parse().ok(), None);
        let all: Vec<_> = headers.get_all(FORWARDED_FOR).iter().cloned().collect();
        assert_eq!(all, ["1.1.1.1, 2.2.2.2, fd00::7"]);
    }

    #[tokio::test]
    async fn cve_2022_3172_redirects_of_an_aggregated_server_do_not_reach_the_client() {
        let reply = async |code: u16, location: &str| {
            let reply = reply_to(&format!("HTTP/1.1 {code} X\r\ncontent-length: 0\r\n{location}\r\n")).await;
            (reply.status().as_u16(), reply.headers().contains_key(header::LOCATION))
        };
        let other = "location: https://other.example\r\n";
        for code in [300, 301, 302, 303, 307, 308] {
            assert_eq!(reply(code, other).await, (502, false), "{code}");
        }
        assert_eq!(reply(304, "").await, (304, false));
        for code in [200, 201] {
            assert_eq!(reply(code, other).await, (code, true), "{code}");
        }
    }
}
