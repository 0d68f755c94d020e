//! Forwards a client's request to an aggregated server.

use http::{HeaderMap, Method, Request, Response, StatusCode};
use hyper::{body::Incoming, upgrade::OnUpgrade};

use crate::{
    aggregation::Remote,
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

/// A request to forward.
pub(crate) struct ForwardedRequest<'a> {
    pub(crate) user: &'a User,
    pub(crate) info: &'a RequestInfo,
    pub(crate) method: &'a Method,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) body: Body,
}

/// Forwards a request, whose body is a stream, and streams the response to the client. Supports upgrades.
pub(crate) async fn run(
    state: &State,
    remote: &Remote,
    arrived: ForwardedRequest<'_>,
    client: ClientUpgrade,
) -> Result<Reply> {
    if remote.resources().is_none() {
        return Err(ApiError::unavailable("service unavailable"));
    }
    let (info, query) = (arrived.info, &arrived.info.query.raw);
    let mark = if query.is_empty() { "" } else { "?" };
    let uri = format!("{}{mark}{query}", info.path);
    let request = Request::builder().method(arrived.method.clone()).uri(uri).body(arrived.body);
    let mut request = request.map_err(|error| ApiError::bad_request(error.to_string()))?;
    *request.headers_mut() = forwarded(arrived.headers, &info.path);
    set_length(&mut request);
    let permit = state.in_flight.proxied(arrived.user)?;
    let answer = state.forwarder().send(remote, arrived.user, request, permit).await?;
    respond(arrived.headers, answer, |server| join(client, server, state.shutdown.clone()))
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
