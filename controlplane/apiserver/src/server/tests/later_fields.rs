//! Stored objects with fields of a later version.

use coracle_kinds::kind::by_kind;
use coracle_store::{Expect, Tier, Write};

use super::*;
use crate::cache::{encode, key_of};

impl Fixture {
    /// Restarts the server after a change of a stored pod.
    async fn with_stored_pod(self, name: &str, pod: &Value) -> Self {
        let (store, directory) = self.close().await;
        let kind = by_kind("v1", "Pod").unwrap();
        let key = key_of(kind, "default", name);
        let entry = store.get(&key).await.unwrap().unwrap();
        let write = Write {
            key: key.into(),
            expect: Expect::Revision(entry.modified),
            value: Some(encode(kind, pod)),
            tier: Tier::Durable,
            guard: None,
        };
        store.write(write).await.unwrap();
        let api = open_on(Arc::new(store), directory.path(), |_config| {}).await;
        Self { api, directory }
    }
}

#[tokio::test]
async fn a_write_removes_the_fields_of_a_later_version() {
    let mut server = Fixture::new().await;
    // The second patch is empty, so the write only removes the fields.
    for (name, patch) in [("a", json!({"metadata": {"labels": {"x": "y"}}})), ("b", json!({}))] {
        let made = server.post(PODS, pod(name)).await;
        assert_eq!(made.code, 201, "{}", made.body);
        let mut stored = made.body;
        stored["spec"]["later"] = json!([{"name": "example.com/later"}]);
        stored["spec"]["containers"][0]["later"] = true.into();
        server = server.with_stored_pod(name, &stored).await;
        // The spec of a pod is immutable, and strict validation refuses unknown fields. Neither rule applies to this
        // field.
        let path = format!("{PODS}/{name}");
        let patched = server.merge(&format!("{path}?fieldValidation=Strict"), patch).await;
        assert_eq!(patched.code, 200, "{}", patched.body);
        let spec = server.get(&path).await.body["spec"].clone();
        assert_eq!((spec.get("later"), spec["containers"][0].get("later")), (None, None), "{spec}");
    }
}
