//! Metrics of priority and fairness. Source: `k8s.io/apiserver/pkg/util/flowcontrol/metrics`.
//!
//! The labels are names of existing objects.

use prometheus::{core::Collector, proto::MetricFamily};

use super::{counter, gauge};
use crate::flow_control::FlowControl;

/// The metrics of levels and schemas.
pub(super) fn current(flow_control: &FlowControl) -> Vec<MetricFamily> {
    let mut families = levels(flow_control);
    families.extend(loads(flow_control));
    families.extend(totals(flow_control));
    families.extend(flow_control.times());
    families
}

/// The seats of levels.
fn levels(flow_control: &FlowControl) -> Vec<MetricFamily> {
    let seats = |name: &str, help: &str| {
        gauge(&format!("apiserver_flowcontrol_{name}_limit_seats"), help, &["priority_level"])
    };
    let nominal = seats("nominal", "Nominal number of execution seats configured for each priority level.");
    let lower = seats("lower", "Number of execution seats that only requests of the priority level can use.");
    let upper = seats(
        "upper",
        "Maximum number of execution seats of each priority level, with those that it borrows.",
    );
    for counts in flow_control.levels() {
        let labels = [counts.name.as_str()];
        nominal.with_label_values(&labels).set(signed(counts.nominal));
        lower.with_label_values(&labels).set(signed(counts.reserved));
        upper.with_label_values(&labels).set(signed(counts.limit));
    }
    [nominal, lower, upper].into_iter().flat_map(|one| one.collect()).collect()
}

/// The requests in queues and in execution.
fn loads(flow_control: &FlowControl) -> Vec<MetricFamily> {
    let load = |name: &str, help: &str| {
        gauge(&format!("apiserver_flowcontrol_current_{name}"), help, &["flow_schema", "priority_level"])
    };
    let executing = [
        load(
            "executing_requests",
            "Number of requests in initial (for a WATCH) or any (for a non-WATCH) execution stage in the API Priority and Fairness subsystem.",
        ),
        load(
            "executing_seats",
            "Concurrency (number of seats) occupied by the currently executing requests in the API Priority and Fairness subsystem.",
        ),
    ];
    let waiting = [
        load(
            "inqueue_requests",
            "Number of requests currently pending in queues of the API Priority and Fairness subsystem.",
        ),
        load(
            "inqueue_seats",
            "Number of seats currently pending in queues of the API Priority and Fairness subsystem.",
        ),
    ];
    for counts in flow_control.schemas() {
        let labels = [counts.schema.as_str(), counts.level.as_str()];
        for (gauges, numbers) in [(&executing, counts.executing), (&waiting, counts.waiting)] {
            for (gauge, number) in gauges.iter().zip(numbers) {
                gauge.with_label_values(&labels).set(signed(number));
            }
        }
    }
    executing.into_iter().chain(waiting).flat_map(|one| one.collect()).collect()
}

/// The requests since the start.
fn totals(flow_control: &FlowControl) -> Vec<MetricFamily> {
    let labels = ["flow_schema", "priority_level"];
    let dispatched = counter(
        "apiserver_flowcontrol_dispatched_requests_total",
        "Number of requests executed by API Priority and Fairness subsystem.",
        &labels,
    );
    let rejected = counter(
        "apiserver_flowcontrol_rejected_requests_total",
        "Number of requests rejected by API Priority and Fairness subsystem.",
        &["flow_schema", "priority_level", "reason"],
    );
    for counts in flow_control.schemas() {
        let (schema, level) = (counts.schema.as_str(), counts.level.as_str());
        dispatched.with_label_values(&[schema, level]).inc_by(counts.dispatched);
        for (reason, number) in counts.rejected.into_iter().filter(|(_, number)| *number > 0) {
            rejected.with_label_values(&[schema, level, reason]).inc_by(number);
        }
    }
    [dispatched, rejected].into_iter().flat_map(|one| one.collect()).collect()
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
