//! gRPC health check of a pod (`grpc.health.v1.Health/Check`), without TLS.

use std::net::SocketAddr;

use coracle_error_chain::chain;
use http::Uri;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::Code;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use super::outcome::Outcome;
use super::target::USER_AGENT;

/// Maximum size of the response in bytes; a valid response has 2.
const ANSWER_MAX: usize = 1024;
/// Maximum bytes that the server may send before they are read.
const WINDOW: u32 = 64 << 10;

/// Checks a service once. An empty name means the server.
pub(super) async fn check(host: &str, port: u16, service: &str) -> Outcome {
    let failed = |error: &(dyn std::error::Error + 'static)| {
        Outcome::of(error, format!("error: failed to connect service at \"{host}:{port}\": {}", chain(error)))
    };
    let stream = match TcpStream::connect((host, port)).await {
        Ok(stream) => stream,
        Err(error) => return failed(&error),
    };
    let authority = stream.peer_addr().unwrap_or_else(|_closed| SocketAddr::from(([127, 0, 0, 1], port)));
    let endpoint =
        Endpoint::from_shared(format!("http://{authority}")).and_then(|e| e.user_agent(USER_AGENT));
    let endpoint = match endpoint {
        Ok(endpoint) => endpoint.initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOW),
        Err(error) => return failed(&error),
    };
    let mut stream = Some(TokioIo::new(stream));
    let connector = tower::service_fn(move |_: Uri| {
        let stream = stream.take();
        async { stream.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::ConnectionAborted)) }
    });
    let channel = match endpoint.connect_with_connector(connector).await {
        Ok(channel) => channel,
        Err(error) => return failed(&error),
    };
    let mut client = HealthClient::new(channel).max_decoding_message_size(ANSWER_MAX);
    match client.check(HealthCheckRequest { service: service.to_owned() }).await {
        Ok(answer) => outcome_of(answer.into_inner().status()),
        Err(status) if status.code() == Code::Unimplemented => Outcome::Failure(format!(
            "error: this server does not implement the grpc health protocol (grpc.health.v1.Health): {}",
            status.message()
        )),
        Err(status) => {
            let text = format!("error: health rpc probe failed: {:?}: {}", status.code(), status.message());
            Outcome::of(&status, text)
        }
    }
}

fn outcome_of(status: ServingStatus) -> Outcome {
    match status {
        ServingStatus::Serving => Outcome::Success,
        other => Outcome::Failure(format!("service unhealthy (responded with {:?})", other.as_str_name())),
    }
}

#[cfg(test)]
mod tests {
    use tonic::transport::Server;
    use tonic_health::ServingStatus as Set;

    use super::*;

    async fn serve() -> (u16, tokio::task::JoinHandle<()>) {
        let (reporter, service) = tonic_health::server::health_reporter();
        reporter.set_service_status("good", Set::Serving).await;
        reporter.set_service_status("bad", Set::NotServing).await;
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        let serving = tokio::spawn(async move {
            Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
        });
        (port, serving)
    }

    #[tokio::test]
    async fn a_grpc_probe_follows_the_servers_answer() {
        let (port, serving) = serve().await;
        let at = ("127.0.0.1", port);
        assert_eq!(check(at.0, at.1, "good").await, Outcome::Success);
        let bad = Outcome::Failure("service unhealthy (responded with \"NOT_SERVING\")".to_owned());
        assert_eq!(check(at.0, at.1, "bad").await, bad);
        assert_eq!(check(at.0, at.1, "").await, Outcome::Success, "the server itself");
        assert!(
            matches!(check(at.0, at.1, "none").await, Outcome::Failure(text) if text.contains("NotFound"))
        );
        serving.abort();
    }

    #[tokio::test]
    async fn a_server_of_another_protocol_is_a_failure() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = ("127.0.0.1", listener.local_addr().unwrap().port());
        let serving = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::io::AsyncWriteExt::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n\r\n")
                .await
                .unwrap();
        });
        assert_eq!(check(at.0, at.1, "").await.passed(), Some(false));
        serving.await.unwrap();
        assert_eq!(check(at.0, at.1, "").await.passed(), Some(false), "nothing listens there any more");
    }

    /// Serves responses with a message of this many bytes: an unknown field, which clients ignore.
    async fn serve_long_messages(listener: tokio::net::TcpListener, length: usize) {
        let (stream, _) = listener.accept().await.unwrap();
        let service = hyper::service::service_fn(move |_: http::Request<hyper::body::Incoming>| async move {
            let mut body = vec![0];
            body.extend(u32::try_from(length).unwrap().to_be_bytes());
            // Number and type of the field, and its length in two parts of seven bits.
            let digits = [(length - 3) % 128, (length - 3) / 128].map(|digit| u8::try_from(digit).unwrap());
            body.extend([0x12, 0x80 | digits[0], digits[1]]);
            body.resize(5 + length, b'x');
            let response = http::Response::builder().header("content-type", "application/grpc");
            response.body(http_body_util::Full::new(bytes::Bytes::from(body)))
        });
        let builder = hyper::server::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
        let _ended = builder.serve_connection(TokioIo::new(stream), service).await;
    }

    #[tokio::test]
    async fn a_response_that_is_too_large_is_not_decoded() {
        for (length, is_refused) in [(ANSWER_MAX, false), (ANSWER_MAX + 1, true)] {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let at = ("127.0.0.1", listener.local_addr().unwrap().port());
            let serving = tokio::spawn(serve_long_messages(listener, length));
            let outcome = check(at.0, at.1, "").await;
            let text = format!("{outcome:?}");
            assert_eq!(text.contains("message length too large"), is_refused, "{text}");
            serving.abort();
        }
    }
}
