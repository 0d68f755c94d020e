//! Tolerations of cached pods. Most pods have the same tolerations, so pods share them.

use std::sync::{Arc, LazyLock};

use k8s_openapi::api::core::v1::Toleration;
use serde::{Deserialize, Deserializer};

/// The tolerations that admission adds to every pod, each for 300 seconds.
static COMMON: LazyLock<Arc<[Toleration]>> = LazyLock::new(|| {
    let toleration = |key: &str| Toleration {
        key: Some(key.to_owned()),
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        toleration_seconds: Some(300),
        value: None,
    };
    ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"].map(toleration).into()
});

/// The tolerations that are relevant for a running pod.
pub(super) fn tolerations<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<[Toleration]>, D::Error> {
    let mut all = Option::<Vec<Toleration>>::deserialize(deserializer)?.unwrap_or_default();
    all.retain(|one| one.effect.as_deref().is_none_or(|effect| matches!(effect, "" | "NoExecute")));
    Ok(if *all == **COMMON { COMMON.clone() } else { all.into() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn common_tolerations_are_shared_and_others_kept() {
        let read = |value| tolerations(value).unwrap();
        let usual = |key: &str| json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300});
        let both = json!([usual("node.kubernetes.io/not-ready"), usual("node.kubernetes.io/unreachable")]);
        assert!(Arc::ptr_eq(&read(both.clone()), &read(both)));
        let kept = read(json!([{"key": "a", "effect": "NoSchedule"}, {"operator": "Exists"}]));
        assert_eq!(kept.len(), 1);
    }
}
