//! The node is one that the pod wants and tolerates. Affinity is the scheduler's; a pod that was put here by
//! name alone is held to its selector and to `NoExecute` taints, as a kubelet holds it.

use k8s_openapi::api::core::v1::{Taint, Toleration};

use super::{Facts, refuse};
use crate::pod::state::Verdict;

pub(super) fn check(facts: &Facts<'_>) -> Result<(), Verdict> {
    let (Some(node), Some(spec)) = (facts.node, &facts.pod.spec) else { return Ok(()) };
    let labels = node.metadata.labels.clone().unwrap_or_default();
    let selected = spec.node_selector.iter().flatten().all(|(key, value)| labels.get(key) == Some(value));
    if !selected {
        let message = "Pod was rejected: Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector";
        return Err(refuse("NodeAffinity", message));
    }
    let taints = node.spec.iter().flat_map(|s| s.taints.iter().flatten());
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let mut hostile =
        taints.filter(|t| t.effect == "NoExecute" && !tolerations.iter().any(|own| tolerates(own, t)));
    match hostile.next() {
        None => Ok(()),
        Some(taint) => {
            let value = taint.value.as_deref().unwrap_or_default();
            let message = format!(
                "Pod was rejected: Predicate TaintToleration failed: node(s) had untolerated taint {{{}: {value}}}",
                taint.key
            );
            Err(refuse("TaintToleration", message))
        }
    }
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let some = |text: &Option<String>| text.clone().filter(|t| !t.is_empty());
    let effect = some(&toleration.effect).is_none_or(|e| e == taint.effect);
    let key = some(&toleration.key).is_none_or(|k| k == taint.key);
    let value = match toleration.operator.as_deref() {
        Some("Exists") => true,
        _ => some(&toleration.key).is_some() && some(&toleration.value) == some(&taint.value),
    };
    effect && key && value
}
