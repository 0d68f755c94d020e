//! pods/log, exec, attach and portforward: forwarded to the kubelet of the pod's node.
//!
//! The bytes of an upgraded connection are forwarded unchanged. The kubelet does not learn the client's identity: it
//! trusts the certificate of this API server.

use coracle_connections::watch_reads;
use coracle_values::string_list;
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use hyper_util::rt::TokioIo;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value};

use super::{kubelet, log_options, log_socket, parent};
use crate::{
    admit::Operation,
    call::Call,
    client_upgrade::ClientUpgrade,
    error::{ApiError, Result},
    reply::{Body, Reply, full},
    request::Query,
    target::ConnectionGuard,
};

/// Characters to encode in a path segment: all except the unreserved characters of RFC 3986.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Maximum bytes of a kubelet's error message.
const MAX_REFUSAL: usize = 64 << 10;

/// Headers of an upgrade besides `sec-websocket-*`. Other headers are not forwarded.
const UPGRADE_HEADERS: &[&str] = &["connection", "upgrade", "x-stream-protocol-version"];

pub(crate) async fn run(call: &Call, method: &Method, client: ClientUpgrade) -> Result<Reply> {
    let is_log = verb_of(call) == "containerLogs";
    if is_log {
        log_options::check(&call.info.query, &call.resource.name)?;
    }
    let pod = parent(call).await?;
    let container = match call.resource.subresource.as_str() {
        "portforward" => None,
        _ => Some(container(&pod, call.info.query.get("container"), is_log)?),
    };
    let node = pod["spec"]["nodeName"].as_str().filter(|node| !node.is_empty());
    let name = &call.resource.name;
    let node =
        node.ok_or_else(|| ApiError::bad_request(format!("pod {name} does not have a host assigned")))?;
    let path = match options(call) {
        Some(options) => {
            let admitted = call.admit_subresource(Operation::Connect, options).await?;
            stream_path(call, &pod, &admitted)?
        }
        None => log_path(call, &container.unwrap_or_default()),
    };
    // The API server itself sends the log over the WebSocket: the kubelet responds with plain text.
    let socket = if is_log { log_socket::NegotiatedProtocol::with(&call.headers)? } else { None };
    let mut request = Request::builder().method(method.clone()).uri(path).body(full(""));
    if let (Ok(request), false) = (&mut request, is_log) {
        *request.headers_mut() = upgrade_headers(&call.headers);
    }
    let request = request.map_err(ApiError::internal)?;
    let mut answer = kubelet::send(call, node, request).await?;
    check_answer(&call.headers, &answer)?;
    if is_log && !answer.status().is_success() {
        return Err(refusal(answer).await);
    }
    if let Some(socket) = socket {
        let (shutdown, limit) = (call.state.shutdown.clone(), call.state.request_timeout);
        return socket.serve(client, answer.into_body(), shutdown, limit);
    }
    if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
        join(client, hyper::upgrade::on(&mut answer), call.state.shutdown.clone());
    }
    Ok(pass(answer))
}

/// The query as the options object for admission. `None` for logs: reading a log is a get, not a connect.
fn options(call: &Call) -> Option<Value> {
    let declared = call.kind.subresource(&call.resource.subresource)?;
    let mut options = requested(&call.resource.subresource, &call.info.query)?;
    options.insert("apiVersion".to_owned(), declared.api_version().into());
    options.insert("kind".to_owned(), declared.kind.as_ref().into());
    Some(options.into())
}

/// The options of a query. The kubelet gets only these options, so admission sees everything that the kubelet gets.
fn requested(subresource: &str, query: &Query) -> Option<Map<String, Value>> {
    let mut options = Map::new();
    match subresource {
        "portforward" => {
            let ports = query.all("ports").iter().flat_map(|list| list.split(','));
            let ports: Vec<Value> =
                ports.filter_map(|port| port.parse::<i32>().ok()).map(Value::from).collect();
            if !ports.is_empty() {
                options.insert("ports".to_owned(), ports.into());
            }
        }
        "exec" | "attach" => {
            for flag in ["stdin", "stdout", "stderr", "tty"].into_iter().filter(|flag| query.flag(flag)) {
                options.insert(flag.to_owned(), true.into());
            }
            let container = query.get("container");
            if !container.is_empty() {
                options.insert("container".to_owned(), container.into());
            }
            if subresource == "exec" {
                options.insert("command".to_owned(), query.all("command").into());
            }
        }
        _ => return None,
    }
    Some(options)
}

/// The kubelet's name of the subresource.
fn verb_of(call: &Call) -> &str {
    match call.resource.subresource.as_str() {
        "portforward" => "portForward",
        "log" => "containerLogs",
        other => other,
    }
}

/// Converts a kubelet's plain-text error into a Status: a client of logs must not read the error as a log.
async fn refusal<B>(answer: Response<B>) -> ApiError
where
    B: http_body::Body,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let code = answer.status().as_u16();
    let body = Limited::new(answer.into_body(), MAX_REFUSAL).collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    ApiError::of_node(code, &String::from_utf8_lossy(&body))
}

/// The kubelet's path for a log.
fn log_path(call: &Call, container: &str) -> String {
    let query = log_query(&call.info.query.raw);
    format!("{}/{}?{query}", base(call), utf8_percent_encode(container, SEGMENT))
}

/// The kubelet's path for a stream with these options.
fn stream_path(call: &Call, pod: &Value, options: &Value) -> Result<String> {
    let container = match verb_of(call) {
        "portForward" => String::new(),
        _ => {
            let name = container(pod, options["container"].as_str().unwrap_or_default(), false)?;
            format!("/{}", utf8_percent_encode(&name, SEGMENT))
        }
    };
    Ok(format!("{}{container}?{}", base(call), query_of(options)))
}

/// The kubelet's path of the pod.
fn base(call: &Call) -> String {
    let encode = |text: &str| utf8_percent_encode(text, SEGMENT).to_string();
    format!("/{}/{}/{}", verb_of(call), encode(call.namespace()), encode(&call.resource.name))
}

/// The kubelet's query for the options of exec, attach or portforward.
fn query_of(options: &Value) -> String {
    let mut words = form_urlencoded::Serializer::new(String::new());
    for (field, own) in [("stdin", "input"), ("stdout", "output"), ("stderr", "error"), ("tty", "tty")] {
        if options[field] == true {
            words.append_pair(own, "1");
        }
    }
    for word in string_list::texts(&options["command"]) {
        words.append_pair("command", word);
    }
    let ports: Vec<String> =
        options["ports"].as_array().into_iter().flatten().map(Value::to_string).collect();
    if !ports.is_empty() {
        // The kubelet expects one parameter with all ports. Source: `streamParams` of upstream's pod registry.
        words.append_pair("port", &ports.join(","));
    }
    words.finish()
}

/// The query of a log request to the kubelet, without the container. The path of that request names the container.
fn log_query(query: &str) -> String {
    let mut words = form_urlencoded::Serializer::new(String::new());
    let kept = form_urlencoded::parse(query.as_bytes()).filter(|(key, _)| key != "container");
    words.extend_pairs(kept).finish()
}

/// Checks the requested container, or chooses the default: the container that the pod's annotation names, the only
/// container, or the first one. A log request has no default if the pod has several containers and no annotation.
fn container(pod: &Value, wanted: &str, logs: bool) -> Result<String> {
    let names = |field: &str| -> Vec<String> {
        let list = pod["spec"][field].as_array().into_iter().flatten();
        list.filter_map(|container| container["name"].as_str()).map(str::to_owned).collect()
    };
    let own = names("containers");
    let pod_name = pod["metadata"]["name"].as_str().unwrap_or_default();
    if wanted.is_empty() {
        let declared = pod["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"].as_str();
        if let Some(declared) = declared.filter(|declared| own.iter().any(|name| name == declared)) {
            return Ok(declared.to_owned());
        }
        return match own.as_slice() {
            [only] => Ok(only.clone()),
            [first, ..] if !logs => Ok(first.clone()),
            _ => Err(ApiError::bad_request(format!(
                "a container name must be specified for pod {pod_name}, choose one of: [{}]",
                own.join(" ")
            ))),
        };
    }
    let known = own.into_iter().chain(names("initContainers")).chain(names("ephemeralContainers"));
    known
        .into_iter()
        .find(|name| name == wanted)
        .ok_or_else(|| ApiError::bad_request(format!("container {wanted} is not valid for pod {pod_name}")))
}

fn upgrade_headers(headers: &HeaderMap) -> HeaderMap {
    let mut kept = HeaderMap::new();
    if headers.contains_key(header::UPGRADE) {
        for (name, value) in headers {
            let name_text = name.as_str();
            if UPGRADE_HEADERS.contains(&name_text) || name_text.starts_with("sec-websocket-") {
                kept.append(name.clone(), value.clone());
            }
        }
    }
    kept
}

/// Copies bytes between both ends after both are upgraded, until one end closes. A client's disconnect ends the copy
/// even while the node does not read.
pub(crate) fn join(client: ClientUpgrade, node: OnUpgrade, shutdown: tokio_util::sync::CancellationToken) {
    coracle_threads::spawn(async move {
        let ClientUpgrade { on, permit, running: _running } = client;
        let (client, node) = match futures::future::try_join(on, node).await {
            Ok(both) => both,
            Err(error) => {
                tracing::debug!(%error, "cannot upgrade the connection of a stream to a pod");
                return;
            }
        };
        let (mut client, abandonment) = watch_reads(TokioIo::new(client), permit);
        let mut node = TokioIo::new(node);
        tokio::select! {
            // If either side closes, the stream ends: it cannot be resumed.
            _ = tokio::io::copy_bidirectional(&mut client, &mut node) => {}
            () = abandonment.happened() => {}
            () = shutdown.cancelled() => {}
        }
    });
}

/// Refuses a protocol switch that the request did not ask for. The client would read the next bytes of the server as
/// responses to its other requests.
pub(crate) fn check_switch(asked: &HeaderMap, status: StatusCode) -> Result<()> {
    if status != StatusCode::SWITCHING_PROTOCOLS || asked.contains_key(header::UPGRADE) {
        return Ok(());
    }
    Err(ApiError::internal("the server switched to another protocol, but the request has no Upgrade header"))
}

/// Whether a response is a redirect, which the client would follow with its credentials.
pub(crate) fn is_redirect<T>(answer: &Response<T>) -> bool {
    answer.status().is_redirection() && answer.headers().contains_key(header::LOCATION)
}

/// Refuses a kubelet's response that switches to another protocol unasked, or that redirects the client. The API server
/// itself follows no redirect.
fn check_answer<T>(asked: &HeaderMap, answer: &Response<T>) -> Result<()> {
    check_switch(asked, answer.status())?;
    if is_redirect(answer) {
        return Err(ApiError::internal(
            "the kubelet attempted to redirect the request, which is not permitted",
        ));
    }
    Ok(())
}

/// The server's response without hop-by-hop headers. With a [`ConnectionGuard`], the connection to the server ends with
/// the body of the response.
pub(crate) fn pass(answer: Response<Incoming>) -> Reply {
    let (mut parts, body) = answer.into_parts();
    let mut guard = parts.extensions.remove::<ConnectionGuard>();
    // The guard is dropped with the body, or after an error.
    let body = body.map_err(move |error| {
        drop(guard.take());
        std::io::Error::other(error)
    });
    let mut reply: Response<Body> = Response::new(body.boxed_unsync());
    *reply.status_mut() = parts.status;
    let switching = parts.status == StatusCode::SWITCHING_PROTOCOLS;
    for (name, value) in &parts.headers {
        let hop = matches!(name.as_str(), "connection" | "upgrade" | "transfer-encoding" | "keep-alive");
        if switching || !hop {
            reply.headers_mut().append(name.clone(), value.clone());
        }
    }
    reply
}

#[cfg(test)]
mod tests {
    use http_body_util::Full;
    use serde_json::json;

    use super::*;

    #[test]
    fn queries_have_the_parameters_of_the_kubelet_api() {
        let of = |subresource: &str, query: &str| {
            requested(subresource, &Query::parse(query)).map(|options| query_of(&Value::Object(options)))
        };
        let asked = "command=a%20b&command=c&container=x&stdin=true&stdout=1&stderr=false&tty=true";
        assert_eq!(of("exec", asked).as_deref(), Some("input=1&output=1&tty=1&command=a+b&command=c"));
        assert_eq!(of("attach", asked).as_deref(), Some("input=1&output=1&tty=1"));
        assert_eq!(of("portforward", "ports=80,81&ports=82").as_deref(), Some("port=80%2C81%2C82"));
        assert_eq!(of("log", "follow=true"), None);
        assert_eq!(log_query("follow=true&container=x&tailLines=3"), "follow=true&tailLines=3");
    }

    #[test]
    fn the_kubelet_gets_no_option_that_admission_has_not_seen() {
        for (subresource, query) in [
            ("exec", "stdout=1&command=id&input=1&error=1"),
            ("exec", "stdout=1&command=id&stdin=false&stdin=true"),
            ("portforward", "ports=80&port=22"),
        ] {
            let seen = requested(subresource, &Query::parse(query)).unwrap();
            assert!(!seen.contains_key("stdin") && !seen.contains_key("stderr"), "{query}: {seen:?}");
            let sent = query_of(&Value::Object(seen));
            assert!(["output=1&command=id", "port=80"].contains(&sent.as_str()), "{query}: {sent}");
        }
    }

    #[test]
    fn changed_options_reach_the_kubelet() {
        let options = json!({"kind": "PodExecOptions", "stdin": true, "stdout": false, "tty": true, "command": ["a b", "c"]});
        assert_eq!(query_of(&options), "input=1&tty=1&command=a+b&command=c");
        assert_eq!(query_of(&json!({"ports": [80, 81]})), "port=80%2C81");
    }

    #[test]
    fn a_switch_of_protocols_needs_a_request_for_it() {
        let mut asked = HeaderMap::new();
        assert!(check_switch(&asked, StatusCode::OK).is_ok());
        assert!(check_switch(&asked, StatusCode::SWITCHING_PROTOCOLS).is_err());
        asked.insert(header::UPGRADE, http::HeaderValue::from_static("websocket"));
        assert!(check_switch(&asked, StatusCode::SWITCHING_PROTOCOLS).is_ok());
    }

    /// CVE-2018-1002102, CVE-2020-8559: a redirect of a kubelet was followed with credentials.
    #[test]
    fn cve_2018_1002102_a_redirect_of_a_kubelet_is_refused() {
        let answer = |code: u16, location: Option<&str>| {
            let answer = Response::builder().status(code);
            let answer = match location {
                Some(location) => answer.header(header::LOCATION, location),
                None => answer,
            };
            check_answer(&HeaderMap::new(), &answer.body(()).unwrap())
        };
        for code in [301, 302, 303, 307, 308] {
            let error = answer(code, Some("https://other.example/exec")).unwrap_err();
            assert_eq!(error.status()["code"], 500, "{}", error.status());
        }
        for (code, location) in [(200, None), (304, None), (403, None), (404, Some("/x"))] {
            assert!(answer(code, location).is_ok(), "{code}");
        }
    }

    #[tokio::test]
    async fn the_error_of_a_kubelet_is_read_up_to_a_limit() {
        let of = async |length: usize| {
            let body = Full::new(bytes::Bytes::from(vec![b'x'; length]));
            refusal(Response::builder().status(404).body(body).unwrap()).await.status()
        };
        assert_eq!(of(5).await["message"], "xxxxx");
        let long = of(MAX_REFUSAL + 1).await;
        assert_eq!((&long["code"], &long["message"]), (&json!(404), &json!("")));
    }
}
