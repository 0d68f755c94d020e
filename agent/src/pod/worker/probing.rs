//! Keeps one probe task per running container that has probes.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use crate::pod::Node;
use crate::pod::probe::{Finding, Watched, wanted};
use crate::pod::state::{Probed, Seen, Shape, Wish, is_sidecar};

/// Probe tasks by container id; dropping one ends it.
#[derive(Default)]
pub(super) struct Probes {
    tasks: HashMap<String, AbortOnDropHandle<()>>,
}

impl Probes {
    /// Starts what is missing and ends what has nothing to probe any more; a pod that ends is not probed.
    pub(super) fn follow(
        &mut self,
        node: &Arc<Node>,
        wish: &Wish,
        (seen, probed): (&Seen, &HashMap<String, Probed>),
        findings: &mpsc::UnboundedSender<Finding>,
    ) {
        let running = |id: &str| seen.containers.iter().any(|c| c.id == id && c.running());
        if wish.ending().is_some() {
            self.tasks.clear();
            return;
        }
        self.tasks.retain(|id, _| running(id));
        let (Some(spec), Some(sandbox)) = (wish.pod().spec.as_ref(), seen.sandbox()) else { return };
        let shape = Shape::of(spec);
        for container in shape.inits().iter().filter(|c| is_sidecar(c)).chain(shape.mains()) {
            let Some(current) = seen.current(&container.name).filter(|c| c.running()) else { continue };
            if !wanted(container) || self.tasks.contains_key(&current.id) {
                continue;
            }
            let ip = sandbox
                .ips
                .first()
                .cloned()
                .or_else(|| node.host_ips().into_iter().next())
                .unwrap_or_default();
            let watched = Watched {
                node: Arc::clone(node),
                pod: Arc::clone(wish.pod()),
                container: container.clone(),
                id: current.id.clone(),
                ip,
                before: probed.get(&current.id).copied().unwrap_or_default(),
                findings: findings.clone(),
            };
            let task = AbortOnDropHandle::new(tokio::spawn(watched.run()));
            self.tasks.insert(current.id.clone(), task);
        }
    }
}
