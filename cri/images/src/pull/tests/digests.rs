//! Content with SHA-512 digests.

use super::store;
use crate::ErrorKind;
use crate::digest::{Algorithm, Digest};
use crate::fixture::{ProxyFault, TestImage, TestProxy, TestRegistry, TestTar};
use crate::pull::PullError;

#[test]
fn an_invalid_digest_is_an_error_of_the_reference() {
    let error = PullError::from("sha256:1".parse::<Digest>().unwrap_err());
    assert_eq!(error.kind(), ErrorKind::InvalidReference);
    assert_eq!(error.to_string(), "\"sha256:1\" is not a sha256 or sha512 digest");
}

fn by_512(content: &str) -> String {
    Digest::by(Algorithm::Sha512, content.as_bytes()).to_string()
}

fn descriptor(media_type: &str, content: &str) -> serde_json::Value {
    serde_json::json!({"mediaType": media_type, "digest": by_512(content), "size": content.len()})
}

/// A registry with these contents under their SHA-512 digests. The first content is also tagged `latest`.
async fn serve(contents: Vec<(String, String)>) -> TestProxy {
    TestProxy::to("unused", move |head, _| {
        let found = contents.iter().find(|(name, _)| head.lines().next().unwrap().contains(name));
        let first = head.contains("/manifests/latest").then(|| &contents[0]);
        ProxyFault::Reply(match found.or(first) {
            Some((_, body)) => {
                let shown = if head.starts_with("HEAD") { "" } else { body };
                format!(
                    "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{shown}",
                    body.len()
                )
            }
            None => "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".to_owned(),
        })
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_of_sha512_digests_is_pulled_kept_exported_and_imported() {
    // The layer is uncompressed, so that all content is text.
    let layer = String::from_utf8(TestTar::new().file("hello", b"by 512").finish()).unwrap();
    let config = serde_json::json!({
        "architecture": crate::config::Platform::host().architecture,
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [by_512(&layer)]},
    })
    .to_string();
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
    })
    .to_string();
    let all = |layer: &str, shown: &str| {
        let own = by_512(&String::from_utf8(TestTar::new().file("hello", b"by 512").finish()).unwrap());
        vec![
            (by_512(&manifest), shown.to_owned()),
            (by_512(&config), config.clone()),
            (own, layer.to_owned()),
        ]
    };
    let line = serve(all(&layer, &manifest)).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let by_digest = format!("{}@{}", line.name("app"), by_512(&manifest));
    let mut ids = Vec::new();
    for name in [line.name("app"), by_digest.clone(), by_digest.clone()] {
        let pulled = images.pull(&name, None, None).await.map_err(|error| error.report()).unwrap();
        assert_eq!(std::fs::read(pulled.layers[0].join("hello")).unwrap(), b"by 512");
        ids.push(pulled.id);
    }
    assert!(ids.iter().all(|id| *id == by_512(&config)), "{ids:?}");
    drop(images);
    let images = store(root.path()).await;
    for name in [&by_digest, &ids[0], ids[0].strip_prefix("sha512:").unwrap()] {
        assert!(images.get(name).is_some(), "{name}");
    }
    let archive = root.path().join("archive.tar");
    images.export(&line.name("app"), &archive).await.map_err(|error| error.report()).unwrap();
    let other = tempfile::tempdir().unwrap();
    let imported =
        store(other.path()).await.import(&archive, None).await.map_err(|error| error.report()).unwrap();
    assert_eq!(imported[0].id, ids[0]);
    for (layer, manifest) in
        [(layer.replace("512", "513"), manifest.clone()), (layer.clone(), manifest.clone() + " ")]
    {
        let line = serve(all(&layer, &manifest)).await;
        let root = tempfile::tempdir().unwrap();
        let name = format!("{}@{}", line.name("app"), by_digest.split('@').next_back().unwrap());
        let error = store(root.path()).await.pull(&name, None, None).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{}", error.report());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_cannot_substitute_another_image_for_a_digest() {
    let registry = TestRegistry::start().await;
    let (wanted, other) = (TestImage::small("wanted"), TestImage::small("other"));
    let digest = registry.push("app", "wanted", &wanted).await;
    let other_digest = registry.push("app", "other", &other).await;
    let proxy = TestProxy::to(registry.address(), move |head, _| {
        if head.starts_with("HEAD") {
            let head = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n";
            ProxyFault::Reply(format!("{head}docker-content-digest: {other_digest}\r\n\r\n"))
        } else {
            ProxyFault::Pass
        }
    })
    .await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let known = images.pull(&proxy.name("app:other"), None, None).await.unwrap();
    assert_eq!(known.id, other.id());
    // The image is in the store the second time.
    for _ in 0..2 {
        let pulled = images.pull(&format!("{}@{digest}", proxy.name("app")), None, None).await.unwrap();
        assert_eq!(pulled.id, wanted.id());
    }
    assert_eq!(proxy.count("HEAD"), 2);
}
