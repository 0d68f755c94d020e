//! What a worker keeps in mind of what its jobs report.

use std::collections::HashSet;

use k8s_openapi::jiff::Timestamp;

use super::Worker;
use crate::pod::apply::{Failed, Report};
use crate::pod::events::Level;
use crate::pod::plan::Plan;
use crate::pod::probe::Finding;
use crate::pod::state::{Condemned, SANDBOX, Shape, VOLUMES, Wish};
use crate::volume;

impl Worker {
    pub(super) fn learn(&mut self, report: Report) {
        let now = Timestamp::now();
        match report {
            Report::Prepared(volumes) => {
                self.volumes = Some(volumes);
                self.memory.prepared = true;
                self.memory.pod_retries.clear(VOLUMES);
                // The pod may have changed while its volumes were made.
                volume::follow(&self.node.volumes, self.wishes.borrow().pod());
            }
            Report::NotPrepared(what) => self.memory.pod_retries.fail(what, now, now),
            Report::SandboxMade => self.memory.pod_retries.clear(SANDBOX),
            Report::Pulling { container, pull } => {
                self.pulls.insert(container, pull);
            }
            Report::NotStarted { container, waiting, failed } => {
                match failed {
                    Failed::Pull { image } => self.memory.pulls.fail(&image, now, now),
                    Failed::Start => self.memory.retries.fail(&container, now, now),
                    Failed::Run => {
                        self.memory.crashes.fail(&container, now, now);
                        self.memory.retries.fail(&container, now, now);
                    }
                }
                self.memory.waiting.insert(container, waiting);
            }
            Report::Started { container, crashed } => self.started(&container, crashed, now),
            Report::Condemned { id, why } => {
                self.memory.condemned.insert(id, Condemned { why, grace: None });
            }
            Report::Hooked { id } => {
                self.hooked.insert(id);
            }
            Report::Released => self.memory.released = true,
            Report::Finished => self.finish(),
        }
    }

    fn started(&mut self, container: &str, crashed: Option<Timestamp>, now: Timestamp) {
        self.memory.waiting.remove(container);
        self.memory.retries.clear(container);
        let wish = self.wishes.borrow().clone();
        let spec = wish.pod().spec.as_ref();
        let image = spec.and_then(|s| Shape::of(s).any(container)).and_then(|c| c.image.clone());
        self.memory.pulls.clear(&image.unwrap_or_default());
        if let Some(crashed) = crashed {
            self.memory.crashes.fail(container, crashed, now);
        }
    }

    pub(super) fn found(&mut self, finding: Finding) {
        match finding {
            Finding::Started { id } => self.memory.probed.entry(id).or_default().started = true,
            Finding::Ready { id, ready } => self.memory.probed.entry(id).or_default().ready = ready,
            Finding::Unhealthy { id, why, grace } => {
                self.memory.condemned.insert(id, Condemned { why: why.to_owned(), grace });
            }
        }
    }

    /// Notes why containers wait, and tells each new reason once.
    pub(super) fn note_waiting(&mut self, wish: &Wish, plan: &Plan) {
        for (container, waiting) in &plan.waiting {
            if self.memory.waiting.get(container) == Some(waiting) {
                continue;
            }
            let recorder = &self.node.recorder;
            let warning = (Level::Warning, "BackOff");
            match waiting.reason.as_str() {
                "CrashLoopBackOff" => {
                    let meta = &wish.pod().metadata;
                    let text = |s: &Option<String>| s.clone().unwrap_or_default();
                    let message = format!(
                        "Back-off restarting failed container {container} in pod {}_{}({})",
                        text(&meta.name),
                        text(&meta.namespace),
                        text(&meta.uid)
                    );
                    recorder.container(wish.pod(), container, warning, message);
                }
                "ImagePullBackOff" => {
                    let spec = wish.pod().spec.as_ref();
                    let image = spec.and_then(|s| Shape::of(s).any(container)).and_then(|c| c.image.clone());
                    let message = format!("Back-off pulling image \"{}\"", image.unwrap_or_default());
                    recorder.container(wish.pod(), container, (Level::Normal, "BackOff"), message);
                    let failed = (Level::Warning, "Failed");
                    recorder.container(wish.pod(), container, failed, "Error: ImagePullBackOff");
                }
                _ => {}
            }
            self.memory.waiting.insert(container.clone(), waiting.clone());
        }
    }

    /// Drops what was remembered about containers that the runtime has no more, and waits that are over.
    pub(super) fn forget_the_absent(&mut self) {
        let here: HashSet<&str> = self.seen.containers.iter().map(|c| c.id.as_str()).collect();
        self.memory.probed.retain(|id, _| here.contains(id.as_str()));
        self.memory.condemned.retain(|id, _| here.contains(id.as_str()));
        self.hooked.retain(|id| here.contains(id.as_str()));
        let seen = &self.seen;
        self.memory.waiting.retain(|name, _| !seen.current(name).is_some_and(|c| c.running()));
    }

    /// The last word: the final status, and the object may go.
    fn finish(&mut self) {
        self.finished = true;
        let wish = self.wishes.borrow().clone();
        let Wish::Run(pod) = &wish else { return };
        let known = self.told.clone().or_else(|| pod.status.clone()).unwrap_or_default();
        self.send(pod, known.clone(), (known, true));
    }
}
