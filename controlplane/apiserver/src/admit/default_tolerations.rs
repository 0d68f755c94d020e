//! Adds the default tolerations: a pod stays on a failed node for some time, five minutes by default.

use async_trait::async_trait;
use serde_json::{Value, json};

use super::{Admission, Admit, Attributes, Operation};
use crate::error::Result;

const NOT_READY: &str = "node.kubernetes.io/not-ready";
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";

/// Seconds for which a pod without its own tolerations stays on a failed node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TolerationSeconds {
    /// On a node that is not ready.
    pub not_ready: i64,
    /// On an unreachable node.
    pub unreachable: i64,
}

pub(super) struct DefaultTolerations;

#[async_trait]
impl Admit for DefaultTolerations {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        // Updates also get the default tolerations. Otherwise a client that sends its original manifest would remove
        // them.
        if attributes.is(Operation::Create, "Pod") || attributes.is(Operation::Update, "Pod") {
            add(&mut object["spec"], admission.toleration_seconds);
        }
        Ok(())
    }
}

/// Adds tolerations with these seconds for the keys that the pod does not tolerate yet.
fn add(spec: &mut Value, seconds: TolerationSeconds) {
    let Some(spec) = spec.as_object_mut() else { return };
    let Some(list) = spec.entry("tolerations").or_insert_with(|| json!([])).as_array_mut() else { return };
    for (key, seconds) in [(NOT_READY, seconds.not_ready), (UNREACHABLE, seconds.unreachable)] {
        let tolerated = list.iter().any(|toleration| {
            let any_key = toleration["key"].as_str().unwrap_or_default().is_empty();
            let any_effect = toleration["effect"].as_str().unwrap_or_default().is_empty();
            (any_key || toleration["key"] == key) && (any_effect || toleration["effect"] == "NoExecute")
        });
        if !tolerated {
            list.push(
                json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULT: TolerationSeconds = TolerationSeconds { not_ready: 300, unreachable: 300 };

    #[test]
    fn tolerations_of_the_pod_stay() {
        let mut spec = json!({"tolerations": [
            {"key": NOT_READY, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}]});
        add(&mut spec, TolerationSeconds { not_ready: 30, unreachable: 40 });
        add(&mut spec, DEFAULT);
        assert_eq!(spec["tolerations"].as_array().unwrap().len(), 2);
        assert_eq!(spec["tolerations"][0]["tolerationSeconds"], 5);
        assert_eq!(
            (&spec["tolerations"][1]["key"], &spec["tolerations"][1]["tolerationSeconds"]),
            (&json!(UNREACHABLE), &json!(40))
        );
        let mut all = json!({"tolerations": [{"operator": "Exists"}]});
        add(&mut all, DEFAULT);
        assert_eq!(all["tolerations"].as_array().unwrap().len(), 1);
    }
}
