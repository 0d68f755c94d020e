//! Oversized responses of registries and token services.

use super::store;
use crate::fixture::{ProxyFault, TestImage, TestProxy, TestRegistry};
use crate::manifest::MANIFEST_MAX;

fn answer(head: &str, length: u64) -> ProxyFault {
    let body = "x".repeat(usize::try_from(length).unwrap());
    ProxyFault::Reply(format!("HTTP/1.1 {head}\r\ncontent-length: {length}\r\n\r\n{body}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_are_not_read_beyond_their_limit() {
    let registry = TestRegistry::start().await;
    registry.push("large", "latest", &TestImage::small("x")).await;
    let kind = "200 OK\r\ncontent-type: application/vnd.oci.image.manifest.v1+json";
    let manifests = TestProxy::to(registry.address(), move |head, _| {
        if head.contains("/manifests/") { answer(kind, MANIFEST_MAX + 1) } else { ProxyFault::Pass }
    })
    .await;
    let tokens = TestProxy::to(registry.address(), |_, _| answer("200 OK", (1 << 20) + 1)).await;
    let realm = tokens.address().to_owned();
    let asks = TestProxy::to(registry.address(), move |_, _| {
        let challenge = format!("www-authenticate: Bearer realm=\"http://{realm}/token\",service=\"test\"");
        ProxyFault::Reply(format!("HTTP/1.1 401 Unauthorized\r\n{challenge}\r\ncontent-length: 0\r\n\r\n"))
    })
    .await;
    // The error contains only the beginning of the registry's text.
    let refuses = TestProxy::to(registry.address(), |_, _| answer("403 Forbidden", 10 << 20)).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    for (line, expected) in [(&manifests, "larger than"), (&asks, "larger than"), (&refuses, "403")] {
        let error = images.pull(&line.name("large"), None, None).await.unwrap_err();
        let report = error.report();
        assert!(report.contains(expected) && report.len() < 2000, "{report}");
    }
}
