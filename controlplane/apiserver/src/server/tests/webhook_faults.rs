//! Admission webhooks that hang, close the connection, or return invalid responses.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{
    webhook::{configure, map, tls},
    *,
};

const CONFIGURATION: &str =
    "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/test.example.com";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// The fault of a webhook. After a request it writes `answer`. Then it closes the connection, or hangs if `hangs` is
/// true.
#[derive(Clone)]
struct Fault {
    answer: Vec<u8>,
    hangs: bool,
}

/// Starts a webhook with a fault. Returns its `clientConfig`.
async fn start(fault: Fault) -> Value {
    let (acceptor, ca_bundle) = tls();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://127.0.0.1:{}/hook", listener.local_addr().unwrap().port());
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (acceptor, fault) = (acceptor.clone(), fault.clone());
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(stream).await else { return };
                let mut request = [0; 16 << 10];
                let _ = stream.read(&mut request).await;
                let _ = stream.write_all(&fault.answer).await;
                let _ = stream.flush().await;
                if fault.hangs {
                    std::future::pending::<()>().await;
                }
                let _ = stream.shutdown().await;
            });
        }
    });
    json!({"url": url, "caBundle": ca_bundle})
}

fn closes(answer: impl Into<Vec<u8>>) -> Fault {
    Fault { answer: answer.into(), hangs: false }
}

fn hangs(answer: &str) -> Fault {
    Fault { answer: answer.into(), hangs: true }
}

fn response(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// A configuration with one webhook for config maps.
fn configuration(client: &Value, policy: &str, seconds: u64) -> Value {
    let rule =
        json!({"operations": ["*"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"]});
    let hook = json!({"name": "test.example.com", "clientConfig": client, "rules": [rule],
        "admissionReviewVersions": ["v1"], "sideEffects": "None", "failurePolicy": policy,
        "timeoutSeconds": seconds});
    json!({"metadata": {"name": "test.example.com"}, "webhooks": [hook]})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_webhook_fails_the_request_or_is_ignored() {
    let server = Fixture::new().await;
    let large = "x".repeat(4 << 20);
    let faults = [
        (hangs(""), "context deadline exceeded"),
        (hangs("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"), "context deadline exceeded"),
        (closes(""), ""),
        (closes("\0\u{1} no HTTP\r\n\r\n"), ""),
        (closes(response("503 Service Unavailable", "")), "status 503"),
        (closes(response("200 OK", "{{{")), "the response is not JSON"),
        (closes(response("200 OK", "{}")), ""),
        (closes(response("200 OK", &large)), "it has more than 3145728 bytes"),
    ];
    for (number, (fault, says)) in faults.into_iter().enumerate() {
        // Only a webhook that hangs may reach its timeout, also on a busy machine.
        let seconds = if fault.hangs { 1 } else { 30 };
        let client = start(fault).await;
        for policy in ["Fail", "Ignore"] {
            configure(&server, "validating", configuration(&client, policy, seconds)).await;
            let answer = server.post(MAPS, map(&format!("m{number}"))).await;
            let message = answer.body["message"].as_str().unwrap_or_default();
            if policy == "Ignore" {
                assert_eq!(answer.code, 201, "{number}: {message}");
            } else {
                let is_named = message.contains("failed calling webhook \"test.example.com\": ");
                assert!(answer.code == 500 && is_named && message.contains(says), "{number}: {message}");
            }
            assert_eq!(server.delete(CONFIGURATION, json!({})).await.code, 200);
        }
    }
}

/// CVE-2020-8561: the API server followed redirects of webhooks to hosts that only the API server can reach.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cve_2020_8561_a_redirect_of_a_webhook_is_not_followed() {
    let server = Fixture::new().await;
    let inside = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    inside.set_nonblocking(true).unwrap();
    let address = inside.local_addr().unwrap();
    for status in [301, 302, 303, 307, 308] {
        for scheme in ["http", "https"] {
            let redirect = format!(
                "HTTP/1.1 {status} Elsewhere\r\nlocation: {scheme}://{address}/\r\ncontent-length: 0\r\n\r\n"
            );
            let client = start(closes(redirect)).await;
            configure(&server, "validating", configuration(&client, "Fail", 30)).await;
            let answer = server.post(MAPS, map("redirected")).await;
            let message = answer.body["message"].as_str().unwrap_or_default();
            assert!(answer.code == 500 && message.contains(&format!("status {status}")), "{message}");
            // If the request had opened a connection, the connection would wait in this queue.
            let connection = inside.accept().map(|(_, from)| from);
            assert_eq!(connection.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
            assert_eq!(server.delete(CONFIGURATION, json!({})).await.code, 200);
        }
    }
}
