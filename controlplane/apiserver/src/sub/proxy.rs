//! nodes/proxy, pods/proxy and services/proxy: HTTP requests and upgrades to a server in the cluster.
//!
//! Source: `pkg/registry/core/{node,pod,service}` (`ResourceLocation`) and `apimachinery/pkg/util/proxy`.

mod links;

use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use serde_json::{Value, json};

use self::links::Links;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::links::fuzz as fuzz_page;
use super::{
    kubelet,
    stream::{check_switch, join, pass},
};
use crate::{
    admit::Operation,
    call::Call,
    client_upgrade::ClientUpgrade,
    error::{ApiError, Result},
    reply::{self, Body, Reply},
    request_body::set_length,
    target::{self, Endpoint},
};

/// Hop-by-hop headers and credentials, which are not forwarded.
const DROPPED: &[&str] = &[
    "authorization",
    "connection",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "content-length",
    "upgrade",
];

/// A server in the cluster, as the path names it: `[scheme:]name[:port]`.
#[derive(Debug, PartialEq, Eq)]
struct ProxyTarget<'a> {
    is_tls: bool,
    name: &'a str,
    /// Number or name; empty for the default.
    port: &'a str,
}

/// Sends a request to the server, with the client's body as a stream.
pub(crate) async fn run(call: &Call, method: &Method, client: ClientUpgrade, body: Body) -> Result<Reply> {
    let named = ProxyTarget::parse(&call.resource.name).ok_or_else(|| {
        let name = &call.resource.name;
        ApiError::bad_request(format!("invalid {} request {name:?}", call.kind.singular))
    })?;
    let is_upgrade = call.headers.contains_key(header::UPGRADE);
    let is_read = matches!(*method, Method::GET | Method::HEAD);
    if call.resource.proxy_path.is_none() && is_read && !is_upgrade {
        return redirect(call);
    }
    if is_upgrade && call.kind.is("", "Node") {
        // A WebSocket upgrade is a GET, even if it runs a command through the kubelet's exec. An upgrade therefore also
        // requires the permission `create`.
        call.authorize_also("create").await?;
    }
    if let Some(options) = options(call) {
        let admitted = call.admit_subresource(Operation::Connect, options.clone()).await?;
        if admitted != options {
            return Err(ApiError::internal(
                "an admission policy or webhook changed the options of a proxy request",
            ));
        }
    }
    let request = request(call, method, body)?;
    let host = call.headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let mut hosts: Vec<String> = host.map(str::to_owned).into_iter().collect();
    let endpoint = match &*call.kind.plural {
        "nodes" => node(call, &named)?,
        "pods" => Some(target::pod(&call.state.cache, call.namespace(), named.name, named.port)?),
        _ => Some(service(call, &named)?),
    };
    let mut answer = match endpoint {
        None => kubelet::send(call, named.name, request).await?,
        Some(endpoint) => {
            hosts.push(endpoint.to_string());
            send(call, named.is_tls, &endpoint, request).await?
        }
    };
    check_switch(&call.headers, answer.status())?;
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        join(client, hyper::upgrade::on(&mut answer), call.state.shutdown.clone());
    }
    let path = &*call.info.path;
    let base = path.strip_suffix(call.resource.proxy_path.as_deref().unwrap_or_default()).unwrap_or(path);
    let links = Links { base: base.trim_end_matches('/').to_owned(), hosts };
    Ok(links.rewrite(pass(answer)))
}

// === impl ProxyTarget ===

impl<'a> ProxyTarget<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let parts: Vec<&str> = text.split(':').collect();
        let (scheme, name, port) = match *parts.as_slice() {
            [name] => ("", name, ""),
            [name, port] => ("", name, port),
            [scheme, name, port] => (scheme, name, port),
            _ => return None,
        };
        let is_tls = match scheme {
            "" | "http" => false,
            "https" => true,
            _ => return None,
        };
        (!name.is_empty()).then_some(Self { is_tls, name, port })
    }
}

/// The port of a node. `None` for the kubelet, to which the API server sends its credentials.
fn node(call: &Call, named: &ProxyTarget<'_>) -> Result<Option<Endpoint>> {
    let kubelet = kubelet::address(call, named.name)?;
    if named.port.is_empty() || named.port == kubelet.port.to_string() {
        return Ok(None);
    }
    target::node(&kubelet.host, named.port, call.state.advertise).map(Some)
}

/// A ready endpoint of the service. As upstream, the error names the service as the path does.
fn service(call: &Call, named: &ProxyTarget<'_>) -> Result<Endpoint> {
    let found = target::service(&call.state.cache, call.namespace(), named.name, named.port);
    found.map_err(|error| match error.message == target::no_endpoints(named.name).message {
        true => target::no_endpoints(&call.resource.name),
        false => error,
    })
}

/// The options object for admission, with the requested path.
fn options(call: &Call) -> Option<Value> {
    let declared = call.kind.subresource(&call.resource.subresource)?;
    let rest = call.resource.proxy_path.as_deref().unwrap_or_default().trim_start_matches('/');
    let mut options = json!({"apiVersion": declared.api_version(), "kind": declared.kind});
    if let Some(options) = options.as_object_mut().filter(|_| !rest.is_empty()) {
        options.insert("path".to_owned(), format!("/{rest}").into());
    }
    Some(options)
}

/// Redirects to the same path with a trailing slash, so that relative links in pages work.
fn redirect(call: &Call) -> Result<Reply> {
    let query = &call.info.query.raw;
    let mark = if query.is_empty() { "" } else { "?" };
    let place = HeaderValue::from_str(&format!("{}/{mark}{query}", call.info.path));
    let mut reply = reply::text(301, "");
    reply.headers_mut().insert(header::LOCATION, place.map_err(ApiError::internal)?);
    Ok(reply)
}

/// The request for the proxied server.
fn request(call: &Call, method: &Method, body: Body) -> Result<Request<Body>> {
    let (rest, query) = (call.resource.proxy_path.as_deref().unwrap_or_default(), &call.info.query.raw);
    let mark = if query.is_empty() { "" } else { "?" };
    let path = format!("/{rest}{mark}{query}");
    let request = Request::builder().method(method.clone()).uri(path).body(body);
    let mut request = request.map_err(|error| ApiError::bad_request(error.to_string()))?;
    *request.headers_mut() = forwarded(&call.headers, &call.info.path);
    set_length(&mut request);
    Ok(request)
}

/// The headers to forward: without hop-by-hop headers, credentials and headers that set an identity.
pub(crate) fn forwarded(headers: &HeaderMap, path: &str) -> HeaderMap {
    let of_connection = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let listed: Vec<String> = of_connection
        .flat_map(|value| value.split(','))
        .map(|name| name.trim().to_ascii_lowercase())
        .collect();
    let mut kept = HeaderMap::new();
    for (name, value) in headers {
        let text = name.as_str();
        // Some servers treat `x_remote_user` as `x-remote-user`.
        let dashed = text.replace('_', "-");
        let is_private = DROPPED.contains(&text)
            || listed.iter().any(|listed| listed == text)
            || dashed.starts_with("impersonate-")
            || dashed.starts_with("x-remote-");
        if !is_private {
            kept.append(name.clone(), value.clone());
        }
    }
    if let Some(protocol) = headers.get(header::UPGRADE) {
        kept.insert(header::UPGRADE, protocol.clone());
        kept.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    }
    if let Ok(path) = HeaderValue::from_str(path) {
        kept.insert("x-forwarded-uri", path);
    }
    kept.insert("x-forwarded-proto", HeaderValue::from_static("https"));
    kept
}

async fn send(
    call: &Call,
    is_tls: bool,
    endpoint: &Endpoint,
    mut request: Request<Body>,
) -> Result<Response<Incoming>> {
    let host = HeaderValue::from_str(&endpoint.to_string()).map_err(ApiError::internal)?;
    request.headers_mut().insert(header::HOST, host);
    let permit = call.state.in_flight.proxied(&call.user)?;
    endpoint.send(is_tls, request, call.state.request_timeout, permit).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_named_with_scheme_and_port() {
        let named = |is_tls, name, port| Some(ProxyTarget { is_tls, name, port });
        assert_eq!(ProxyTarget::parse("web"), named(false, "web", ""));
        assert_eq!(ProxyTarget::parse("web:80"), named(false, "web", "80"));
        assert_eq!(ProxyTarget::parse("https:web:"), named(true, "web", ""));
        assert_eq!(ProxyTarget::parse("http:web:metrics"), named(false, "web", "metrics"));
        for text in ["", ":80", "ftp:web:", "a:b:c:d"] {
            assert_eq!(ProxyTarget::parse(text), None, "{text}");
        }
    }

    #[test]
    fn credentials_and_headers_of_the_connection_are_not_forwarded() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("authorization", "Bearer x"),
            ("x-remote-user", "root"),
            ("x_remote_group", "system:masters"),
            ("impersonate-user", "root"),
            ("connection", "x-hop, Upgrade"),
            ("x-hop", "1"),
            ("upgrade", "websocket"),
            ("accept", "a/b"),
        ] {
            headers.insert(name, value.parse().unwrap());
        }
        let kept = forwarded(&headers, "/p");
        let mut names: Vec<&str> = kept.keys().map(header::HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["accept", "connection", "upgrade", "x-forwarded-proto", "x-forwarded-uri"]);
        assert_eq!(kept["connection"], "Upgrade");
    }
}
