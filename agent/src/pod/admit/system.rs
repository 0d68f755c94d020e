//! Check of the pod's operating system.

use k8s_openapi::api::core::v1::Pod;

use super::input::refuse;
use crate::pod::state::Verdict;

pub(super) fn check(pod: &Pod) -> Result<(), Verdict> {
    let os = pod.spec.as_ref().and_then(|spec| spec.os.as_ref());
    if os.is_some_and(|os| os.name != "linux") {
        let message = "Pod was rejected: Failed to admit pod as the OS field doesn't match node OS";
        return Err(refuse("PodOSNotSupported", message));
    }
    Ok(())
}
