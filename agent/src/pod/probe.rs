//! Liveness, readiness and startup probes: one task for each running container with probes. Only a changed result wakes
//! the pod's worker. While a pod ends, only readiness is probed: proxies send traffic to a terminating endpoint as long
//! as it is ready.

mod grpc;
pub(crate) mod http;
pub(crate) mod metrics;
pub(crate) mod outcome;
mod schedule;
mod target;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use coracle_error_chain::chain;
use coracle_proto::cri;
use futures::channel::mpsc;
use k8s_openapi::api::core::v1::{Container, Pod, Probe};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::NodeContext;
use super::state::Probed;
use crate::event_recorder::{ContainerRef, Level, MESSAGE_MAX};
use crate::resolver;
use crate::runtime::RuntimeError;
use metrics::ContainerCounts;
use outcome::Outcome;
use schedule::{Attempt, Schedule};
use target::port;

/// A changed probe result, for the worker.
#[derive(Debug)]
pub(crate) enum Finding {
    Started {
        id: String,
    },
    Ready {
        id: String,
        ready: bool,
    },
    /// The container must be restarted. `grace` in seconds replaces the pod's grace period.
    Unhealthy {
        id: String,
        why: &'static str,
        grace: Option<i64>,
    },
}

/// A container that is probed.
pub(crate) struct Watched {
    pub(crate) node: Arc<NodeContext>,
    pub(crate) pod: Arc<Pod>,
    pub(crate) container: Container,
    pub(crate) id: String,
    pub(crate) ip: String,
    /// Results of an earlier task.
    pub(crate) before: Probed,
    pub(crate) findings: mpsc::UnboundedSender<Finding>,
    pub(crate) counts: Arc<ContainerCounts>,
    /// Cancelled when the pod has to end.
    pub(crate) ending: CancellationToken,
}

/// Whether a container has a probe that runs. While its pod ends, only the readiness probe runs.
pub(crate) fn wanted(container: &Container, is_ending: bool) -> bool {
    let has_other = container.liveness_probe.is_some() || container.startup_probe.is_some();
    container.readiness_probe.is_some() || has_other && !is_ending
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Startup,
    Readiness,
    Liveness,
}

// === impl Kind ===

impl Kind {
    /// The name in events and metrics.
    fn name(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Readiness => "Readiness",
            Self::Liveness => "Liveness",
        }
    }
}

/// Consecutive results, compared with the thresholds.
#[derive(Debug, Default, PartialEq, Eq)]
struct Streak {
    good: i32,
    bad: i32,
}

impl Streak {
    /// Counts a result. Returns the result when it reaches its threshold.
    fn count(&mut self, good: bool, probe: &Probe) -> Option<bool> {
        let (successes, failures) =
            (probe.success_threshold.unwrap_or(1).max(1), probe.failure_threshold.unwrap_or(3).max(1));
        if good {
            self.bad = 0;
            self.good = self.good.saturating_add(1);
            (self.good >= successes).then_some(true)
        } else {
            self.good = 0;
            self.bad = self.bad.saturating_add(1);
            (self.bad >= failures).then_some(false)
        }
    }
}

impl Watched {
    /// Probes until dropped, or until the container must be restarted.
    pub(crate) async fn run(self) {
        if let Some(probe) = self.container.startup_probe.as_ref().filter(|_| !self.before.started)
            && self.ending.run_until_cancelled(self.until_decided(probe)).await != Some(true)
        {
            return;
        }
        self.send(Finding::Started { id: self.id.clone() });
        let readiness = async {
            if let Some(probe) = &self.container.readiness_probe {
                self.keep_readiness(probe).await;
            }
        };
        let liveness = async {
            if let Some(probe) = &self.container.liveness_probe {
                self.ending.run_until_cancelled(self.until_unhealthy(probe)).await;
            }
        };
        tokio::join!(readiness, liveness);
    }

    fn send(&self, finding: Finding) {
        // Without a worker the result is not needed.
        let _ = self.findings.unbounded_send(finding);
    }

    fn report_unhealthy(&self, probe: &Probe, why: &'static str) {
        let grace = probe.termination_grace_period_seconds;
        self.send(Finding::Unhealthy { id: self.id.clone(), why, grace });
    }

    async fn until_decided(&self, probe: &Probe) -> bool {
        let schedule = Schedule::until_success(period(probe));
        let decided = self.keep(Kind::Startup, probe, schedule, ControlFlow::Break).await;
        if !decided {
            self.report_unhealthy(probe, "failed startup probe");
        }
        decided
    }

    async fn until_unhealthy(&self, probe: &Probe) {
        let schedule = Schedule::regular(period(probe));
        let decide = |good| if good { ControlFlow::Continue(()) } else { ControlFlow::Break(()) };
        self.keep(Kind::Liveness, probe, schedule, decide).await;
        self.report_unhealthy(probe, "failed liveness probe");
    }

    async fn keep_readiness(&self, probe: &Probe) {
        let mut ready = self.before.ready;
        let period = period(probe);
        let schedule = if ready { Schedule::regular(period) } else { Schedule::until_success(period) };
        self.keep::<()>(Kind::Readiness, probe, schedule, |now| {
            if now != ready {
                ready = now;
                self.send(Finding::Ready { id: self.id.clone(), ready });
            }
            ControlFlow::Continue(())
        })
        .await;
    }

    /// Probes on schedule, and passes each result that reaches its threshold to `decide`, until `decide` returns
    /// `Break`.
    async fn keep<T>(
        &self,
        kind: Kind,
        probe: &Probe,
        mut schedule: Schedule,
        mut decide: impl FnMut(bool) -> ControlFlow<T>,
    ) -> T {
        let (mut streak, mut attempt) = (Streak::default(), Attempt::Regular);
        if let Some(delay) = initial_delay(probe) {
            tokio::time::sleep(delay).await;
        }
        loop {
            let begin = Instant::now();
            let outcome = self.probe(probe).await;
            let took = begin.elapsed();
            let Some(good) = outcome.passed() else {
                self.counts.add(kind, &outcome, took);
                self.record(kind, outcome);
                tokio::time::sleep(schedule.retry()).await;
                continue;
            };
            if good || attempt == Attempt::Regular {
                self.counts.add(kind, &outcome, took);
                self.record(kind, outcome);
                if let Some(reached) = streak.count(good, probe)
                    && let ControlFlow::Break(end) = decide(reached)
                {
                    return end;
                }
            }
            let delay;
            (delay, attempt) = schedule.next(good);
            tokio::time::sleep(delay).await;
        }
    }

    /// One attempt within the probe's timeout. The runtime limits the time of a command, as with the kubelet. A command
    /// that exits in time succeeds, even if its child processes hold its outputs open up to the timeout.
    async fn probe(&self, probe: &Probe) -> Outcome {
        let limit = timeout(probe);
        // The future is boxed, so that its memory is free while the task sleeps between attempts.
        let asking = Box::pin(self.once(probe, limit));
        if probe.exec.is_some() {
            return asking.await;
        }
        let late = |_elapsed| Outcome::Failure(format!("it did not answer within {limit:?}"));
        tokio::time::timeout(limit, asking).await.unwrap_or_else(late)
    }

    /// Records an event for the outcome, unless it is a plain success.
    fn record(&self, kind: Kind, outcome: Outcome) {
        let name = kind.name();
        let (reason, message) = match outcome {
            Outcome::Success => return,
            Outcome::Warning(what) => ("ProbeWarning", format!("{name} probe warning: {what}")),
            Outcome::Failure(why) => ("Unhealthy", format!("{name} probe failed: {why}")),
            Outcome::Unknown(why) => {
                ("Unhealthy", format!("{name} probe errored and resulted in unknown state: {why}"))
            }
        };
        self.node.recorder.container(
            ContainerRef { pod: &self.pod, name: &self.container.name },
            Level::Warning,
            reason,
            message,
        );
    }

    async fn once(&self, probe: &Probe, limit: Duration) -> Outcome {
        if let Some(exec) = &probe.exec {
            return self.exec(exec.command.clone().unwrap_or_default(), limit).await;
        }
        let namespace = self.pod.metadata.namespace.as_deref().unwrap_or_default();
        if let Some(get) = &probe.http_get {
            let answer = match http::Request::new(get, &self.container, &self.ip) {
                Ok(request) => http::get(request, namespace).await,
                Err(error) => Err(error),
            };
            return answer.map_or_else(|error| error.outcome(), |answer| answer.outcome());
        }
        if let Some(socket) = &probe.tcp_socket {
            let Some(port) = port(&socket.port, &self.container) else {
                return http::HttpError::Port.outcome();
            };
            let host = socket.host.as_deref().filter(|h| !h.is_empty()).unwrap_or(&self.ip);
            return connect(namespace, host, port).await;
        }
        if let Some(grpc) = &probe.grpc {
            let Ok(port) = u16::try_from(grpc.port) else { return http::HttpError::Port.outcome() };
            return grpc::check(&self.ip, port, grpc.service.as_deref().unwrap_or_default()).await;
        }
        Outcome::Unknown("the probe has no handler".to_owned())
    }

    /// A command that exceeds the timeout is a failure. A command that the runtime cannot run has no result, as
    /// upstream.
    async fn exec(&self, cmd: Vec<String>, limit: Duration) -> Outcome {
        let timeout = i64::try_from(limit.as_secs()).unwrap_or(i64::MAX);
        let request = cri::ExecSyncRequest { container_id: self.id.clone(), cmd, timeout };
        let answer = match self.node.runtime.exec_sync(request).await {
            Ok(answer) => answer,
            Err(RuntimeError::DeadlineExceeded(message)) => {
                return Outcome::Failure(message);
            }
            Err(error) => return Outcome::Unknown(error.message().to_owned()),
        };
        if answer.exit_code == 0 {
            return Outcome::Success;
        }
        let mut output = answer.stdout;
        output.extend(answer.stderr);
        // The maximum length of an event's message.
        output.truncate(MESSAGE_MAX);
        Outcome::Failure(String::from_utf8_lossy(&output).into_owned())
    }
}

/// Probes a TCP port, for a pod of the namespace.
async fn connect(namespace: &str, host: &str, port: u16) -> Outcome {
    match resolver::connect(namespace, host, port).await {
        Ok(_stream) => Outcome::Success,
        Err(error) => Outcome::of(&error, format!("cannot connect to {host}:{port}: {}", chain(&error))),
    }
}

fn seconds(given: Option<i32>, default: u64) -> Duration {
    Duration::from_secs(given.and_then(|s| u64::try_from(s).ok()).unwrap_or(default))
}

/// The delay before the first attempt. None if the delay is zero: a timer of length zero fires up to a millisecond
/// later.
fn initial_delay(probe: &Probe) -> Option<Duration> {
    Some(seconds(probe.initial_delay_seconds, 0)).filter(|delay| !delay.is_zero())
}

/// As upstream, zero is the default of one second.
fn timeout(probe: &Probe) -> Duration {
    seconds(probe.timeout_seconds, 1).max(Duration::from_secs(1))
}

fn period(probe: &Probe) -> Duration {
    seconds(probe.period_seconds, 10).max(Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

    use super::*;

    #[test]
    fn results_count_when_they_come_in_a_row() {
        let probe = Probe { success_threshold: Some(2), failure_threshold: Some(3), ..Probe::default() };
        let mut streak = Streak::default();
        let reached: Vec<_> = [true, true, false, false, true, false, false, false]
            .into_iter()
            .map(|good| streak.count(good, &probe))
            .collect();
        assert_eq!(reached, [None, Some(true), None, None, None, None, None, Some(false)]);
    }

    #[test]
    fn only_readiness_is_probed_while_a_pod_ends() {
        let with = |probes: serde_json::Value| {
            let mut container = probes;
            container["name"] = "c".into();
            let container: Container = serde_json::from_value(container).unwrap();
            [false, true].map(|is_ending| wanted(&container, is_ending))
        };
        let probe = serde_json::json!({"tcpSocket": {"port": 80}});
        assert_eq!(with(serde_json::json!({})), [false, false]);
        assert_eq!(with(serde_json::json!({"readinessProbe": probe})), [true, true]);
        assert_eq!(with(serde_json::json!({"livenessProbe": probe})), [true, false]);
        assert_eq!(with(serde_json::json!({"startupProbe": probe})), [true, false]);
    }

    #[test]
    fn only_an_initial_delay_of_a_second_or_more_needs_a_timer() {
        let delay = |given| {
            let probe = Probe { initial_delay_seconds: given, ..Probe::default() };
            initial_delay(&probe).map(|delay| delay.as_secs())
        };
        assert_eq!([None, Some(0), Some(-1), Some(5)].map(delay), [None, None, None, Some(5)]);
    }

    #[test]
    fn a_timeout_is_a_second_at_least() {
        let timeout = |given| timeout(&Probe { timeout_seconds: given, ..Probe::default() }).as_secs();
        assert_eq!([None, Some(0), Some(-1), Some(5)].map(timeout), [1, 1, 1, 5]);
    }

    #[tokio::test]
    async fn a_failed_connection_names_its_address() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(connect("ns", "127.0.0.1", port).await.passed(), Some(true));
        let closed = coracle_testing::ClosedPort::reserve();
        let port = closed.address().port();
        let Outcome::Failure(why) = connect("ns", "127.0.0.1", port).await else {
            panic!("no listener is left")
        };
        assert_eq!(why, format!("cannot connect to 127.0.0.1:{port}: Connection refused"));
    }

    #[test]
    fn a_named_port_is_found_among_the_containers_ports() {
        let container: Container = serde_json::from_value(serde_json::json!(
            {"name": "c", "ports": [{"name": "web", "containerPort": 80}]}))
        .unwrap();
        assert_eq!(port(&IntOrString::String("web".into()), &container), Some(80));
        assert_eq!(port(&IntOrString::String("none".into()), &container), None);
        assert_eq!(port(&IntOrString::Int(8080), &container), Some(8080));
    }
}
