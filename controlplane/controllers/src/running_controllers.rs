//! The metric of running controllers, in the text format of Prometheus. Source:
//! `component-base/metrics/prometheus/controllers`.
//!
//! As in upstream's kube-controller-manager, the metric has only the controller of pod address ranges (`nodeipam`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use crate::metric_text::{head, line};

/// The controller has not run in this process yet.
const NEVER: u8 = 0;
const RUNNING: u8 = 1;
const STOPPED: u8 = 2;

/// Whether the controllers of this process run. A clone shares the state.
#[derive(Clone, Debug, Default)]
pub struct RunningControllers(Arc<AtomicU8>);

/// A guard for running controllers. They stop when the guard is dropped.
#[derive(Debug)]
pub(crate) struct Running(RunningControllers);

// === impl RunningControllers ===

impl RunningControllers {
    /// Records that the controllers run.
    pub(crate) fn begin(&self) -> Running {
        self.0.store(RUNNING, Relaxed);
        Running(self.clone())
    }

    /// The metric in the text format of Prometheus. Empty before the first start.
    #[must_use]
    pub fn text(&self) -> String {
        let (state, mut text) = (self.0.load(Relaxed), String::new());
        if state != NEVER {
            let name = "running_managed_controllers";
            head(&mut text, name, "gauge", "Whether a controller runs in this process.", 1);
            let labels = "name=\"nodeipam\",manager=\"kube-controller-manager\"";
            line(&mut text, name, labels, u64::from(state == RUNNING));
        }
        text
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.0.store(STOPPED, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_runs_until_its_guard_is_dropped() {
        let controllers = RunningControllers::default();
        assert_eq!(controllers.text(), "");
        let sample = "running_managed_controllers{name=\"nodeipam\",manager=\"kube-controller-manager\"}";
        let running = controllers.begin();
        assert!(controllers.text().ends_with(&format!("{sample} 1\n")), "{}", controllers.text());
        drop(running);
        assert!(controllers.text().ends_with(&format!("{sample} 0\n")), "{}", controllers.text());
    }
}
