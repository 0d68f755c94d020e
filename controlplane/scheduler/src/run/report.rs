//! Events about bindings.

use crate::object::Pod;
use coracle_events::{Event, Recorder};
use coracle_values::object::ObjectExt;

/// Records that a pod waits for the drivers of its devices.
pub(super) fn record_wait(recorder: &Recorder, pod: &Pod, node: &str) {
    let message = format!("waiting for binding conditions for device on node {node}");
    let event = Event::normal("BindingConditionsPending", message);
    recorder.record(pod.object_reference(), pod.scheduler().to_owned(), event);
}
