//! Checks the node selector and the `NoExecute` taints at admission, as the kubelet does. Only the scheduler checks
//! node affinity.

use coracle_values::label_selector::has_all;
use coracle_values::toleration::{evicts, is_tolerated};

use super::input::{AdmissionInput, refuse};
use crate::pod::state::Verdict;

pub(super) fn check(input: &AdmissionInput<'_>) -> Result<(), Verdict> {
    let (Some(node), Some(spec)) = (input.node, &input.pod.spec) else { return Ok(()) };
    let selected = has_all(node.metadata.labels.as_ref(), spec.node_selector.as_ref());
    if !selected {
        let message = "Pod was rejected: Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector";
        return Err(refuse("NodeAffinity", message));
    }
    let taints = node.spec.iter().flat_map(|s| s.taints.iter().flatten());
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let mut untolerated = taints.filter(|taint| evicts(taint) && !is_tolerated(taint, tolerations));
    match untolerated.next() {
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
