//! Forwards a client's request to an aggregated server.

use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::Full;

use crate::{
    aggregation::Remote,
    authn::User,
    client_upgrade::ClientUpgrade,
    error::{ApiError, Result},
    pretty::Forwarded,
    reply::{self, Reply},
    request::RequestInfo,
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
    pub(crate) body: bytes::Bytes,
}

/// Forwards a request, and streams the response to the client. Supports upgrades.
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
    let request = Request::builder().method(arrived.method.clone()).uri(uri).body(Full::new(arrived.body));
    let mut request = request.map_err(|error| ApiError::bad_request(error.to_string()))?;
    *request.headers_mut() = forwarded(arrived.headers, &info.path);
    let permit = state.in_flight.proxied(arrived.user)?;
    let mut answer = state.forwarder().send(remote, arrived.user, request, permit).await?;
    check_switch(arrived.headers, answer.status())?;
    // The client would send its credentials to the address that the server chose (CVE-2022-3172).
    if is_redirect(&answer) {
        return Ok(reply::text(
            502,
            "the backend attempted to redirect this request, which is not permitted",
        ));
    }
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        join(client, hyper::upgrade::on(&mut answer), state.shutdown.clone());
    }
    let mut reply = pass(answer);
    reply.extensions_mut().insert(Forwarded);
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use http::header;

    use super::*;

    #[test]
    fn cve_2022_3172_redirects_of_an_aggregated_server_do_not_reach_the_client() {
        let answer = |code: u16, location: &[&str]| {
            let mut answer = http::Response::builder().status(code);
            for location in location {
                answer = answer.header(header::LOCATION, *location);
            }
            is_redirect(&answer.body(()).unwrap())
        };
        for code in [300, 301, 302, 303, 307, 308] {
            assert!(answer(code, &["https://other.example"]), "{code}");
        }
        assert!(!answer(304, &[]) && !answer(200, &["https://other.example"]) && !answer(201, &["/x"]));
    }
}
