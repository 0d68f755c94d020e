//! Periods of a graceful node shutdown, as settings. The rules are those of upstream's `ValidateKubeletConfiguration`.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use coracle_agent::{ShutdownPeriod, ShutdownPeriods};

use super::NodeSettings;

/// Checks the settings, and converts them to the periods of all priorities.
pub(super) fn decide(node: &NodeSettings) -> anyhow::Result<ShutdownPeriods> {
    let (total, critical) = (node.shutdown_grace_period.0, node.shutdown_grace_period_critical_pods.0);
    periods(total, critical, &node.shutdown_grace_period_by_pod_priority)
}

/// The periods of a total duration and the part of critical pods, or of seconds by priority.
fn periods(
    total: Duration,
    critical: Duration,
    by_priority: &BTreeMap<String, String>,
) -> anyhow::Result<ShutdownPeriods> {
    anyhow::ensure!(
        critical <= total,
        "shutdown-grace-period-critical-pods must not be larger than shutdown-grace-period"
    );
    let total = seconds("shutdown-grace-period", total)?;
    let critical = seconds("shutdown-grace-period-critical-pods", critical)?;
    if by_priority.is_empty() {
        return Ok(ShutdownPeriods::of_total(total, critical));
    }
    anyhow::ensure!(
        total == 0,
        "shutdown-grace-period and shutdown-grace-period-by-pod-priority are both set: use only one of them"
    );
    let periods = by_priority.iter().map(|(priority, seconds)| period(priority, seconds));
    Ok(ShutdownPeriods::by_priority(periods.collect::<anyhow::Result<_>>()?))
}

/// The duration in whole seconds.
fn seconds(name: &str, duration: Duration) -> anyhow::Result<u32> {
    let is_valid = duration.is_zero() || duration >= Duration::from_secs(1);
    anyhow::ensure!(is_valid, "{name} must be 0, or one second or longer");
    u32::try_from(duration.as_secs()).with_context(|| format!("{name} is too long"))
}

fn period(priority: &str, seconds: &str) -> anyhow::Result<ShutdownPeriod> {
    let expected = || {
        format!(
            "shutdown-grace-period-by-pod-priority: {priority}={seconds} is not a priority and a number of seconds, \
             such as 1000=60"
        )
    };
    Ok(ShutdownPeriod {
        priority: priority.parse().with_context(expected)?,
        seconds: seconds.parse().with_context(expected)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(total: u64, critical: u64, by_priority: &[(&str, &str)]) -> anyhow::Result<ShutdownPeriods> {
        let pairs = by_priority.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        periods(Duration::from_millis(total), Duration::from_millis(critical), &pairs.collect())
    }

    #[test]
    fn the_periods_are_a_total_or_belong_to_priorities() {
        assert!(of(0, 0, &[]).unwrap().is_empty());
        assert_eq!(of(30_000, 10_000, &[]).unwrap(), ShutdownPeriods::of_total(30, 10));
        let period = |priority, seconds| ShutdownPeriod { priority, seconds };
        let expected = ShutdownPeriods::by_priority(vec![period(0, 60), period(-10, 5)]);
        assert_eq!(of(0, 0, &[("0", "60"), ("-10", "5")]).unwrap(), expected);
    }

    #[test]
    fn periods_that_the_kubelet_refuses_are_refused() {
        type ByPriority = &'static [(&'static str, &'static str)];
        let refused: [(u64, u64, ByPriority); 7] = [
            (10_000, 20_000, &[]),
            (500, 0, &[]),
            (10_000, 500, &[]),
            (10_000, 0, &[("0", "60")]),
            (0, 0, &[("high", "60")]),
            (0, 0, &[("0", "1m")]),
            (0, 0, &[("0", "-1")]),
        ];
        for (total, critical, by_priority) in refused {
            assert!(of(total, critical, by_priority).is_err(), "{total} {critical} {by_priority:?}");
        }
    }
}
