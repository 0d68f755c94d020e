//! Limits on the speed of scaling: stabilization windows and policies. Source: upstream's
//! `horizontal.go`.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::autoscaling::v2::{HPAScalingPolicy, HPAScalingRules, HorizontalPodAutoscalerBehavior};

/// Replicas to which a target without a behavior can always grow. If twice the current number is more, that number is
/// the limit.
const MIN_SCALE_UP_LIMIT: i32 = 4;
/// Maximum number of stored recommendations of different numbers of replicas, and of scale events. The longest window
/// is one hour, by default with one entry every 15 seconds.
const MAX_HISTORY: usize = 300;

/// Recent recommendations and scale events of one autoscaler.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    recommendations: Vec<Record>,
    ups: Vec<Record>,
    downs: Vec<Record>,
}

/// A recommendation or a scale event.
#[derive(Clone, Copy, Debug)]
struct Record {
    at: Timestamp,
    /// The recommended replicas, or the number of added or removed replicas.
    replicas: i32,
}

/// The replicas before and after the recommendation, and the limits on them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub(super) current: i32,
    pub(super) desired: i32,
    pub(super) min: i32,
    pub(super) max: i32,
    /// Stabilization window of a decrease, unless the behavior has one.
    pub(super) down_window: Duration,
}

/// Reason and message of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Explanation {
    pub(super) reason: &'static str,
    pub(super) message: &'static str,
}

/// The number of replicas after a step.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Limited {
    pub(super) replicas: i32,
    /// Whether the step changed the number.
    pub(super) is_limited: bool,
    pub(super) why: Explanation,
}

/// The results of both steps: the stabilization, and the limit on the speed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Normalized {
    pub(super) stabilized: Limited,
    pub(super) limited: Limited,
}

/// The rules of one direction with their defaults.
struct Rules<'a> {
    window: i32,
    policies: &'a [HPAScalingPolicy],
    select: &'a str,
}

const STABILIZED_UP: Explanation = Explanation {
    reason: "ScaleUpStabilized",
    message: "recent recommendations were lower than current one, applying the lowest recent recommendation",
};
const STABILIZED_DOWN: Explanation = Explanation {
    reason: "ScaleDownStabilized",
    message: "recent recommendations were higher than current one, applying the highest recent recommendation",
};
const READY: Explanation =
    Explanation { reason: "ReadyForNewScale", message: "recommended size matches current size" };
const IN_RANGE: Explanation =
    Explanation { reason: "DesiredWithinRange", message: "the desired count is within the acceptable range" };
const TOO_FEW: Explanation = Explanation {
    reason: "TooFewReplicas",
    message: "the desired replica count is less than the minimum replica count",
};
const TOO_MANY: Explanation = Explanation {
    reason: "TooManyReplicas",
    message: "the desired replica count is more than the maximum replica count",
};
const TOO_FAST_UP: Explanation = Explanation {
    reason: "ScaleUpLimit",
    message: "the desired replica count is increasing faster than the maximum scale rate",
};
const TOO_FAST_DOWN: Explanation = Explanation {
    reason: "ScaleDownLimit",
    message: "the desired replica count is decreasing faster than the maximum scale rate",
};

/// Stabilization windows in seconds.
#[derive(Clone, Copy)]
struct Windows {
    up: i32,
    down: i32,
    /// Whether the autoscaler has a behavior.
    has_behavior: bool,
}

// === impl Range ===

impl Range {
    fn limited(self, replicas: i32, why: Explanation) -> Limited {
        Limited { replicas, is_limited: replicas != self.desired, why }
    }
}

// === impl History ===

impl History {
    /// Records the replicas of the first reconcile as a recommendation, so that the number does not decrease
    /// immediately.
    pub(super) fn begin(&mut self, replicas: i32, now: Timestamp) {
        if self.recommendations.is_empty() {
            self.recommendations.push(Record { at: now, replicas });
        }
    }

    /// Applies stabilization windows and limits to a recommendation, and records it.
    pub(super) fn normalize(
        &mut self,
        behavior: Option<&HorizontalPodAutoscalerBehavior>,
        range: Range,
        now: Timestamp,
    ) -> Normalized {
        let window = i32::try_from(range.down_window.as_secs()).unwrap_or(i32::MAX);
        let up = Rules::of(behavior.and_then(|behavior| behavior.scale_up.as_ref()), 0);
        let down = Rules::of(behavior.and_then(|behavior| behavior.scale_down.as_ref()), window);
        let windows = Windows { up: up.window, down: down.window, has_behavior: behavior.is_some() };
        let recommended = self.stabilize(windows, range, now);
        let is_limited = recommended != range.desired;
        let why = match (is_limited, range.desired >= range.current && behavior.is_some()) {
            (false, _) => READY,
            (true, true) => STABILIZED_UP,
            (true, false) => STABILIZED_DOWN,
        };
        let stabilized = Limited { replicas: recommended, is_limited, why };
        let range = Range { desired: recommended, ..range };
        let limited = match behavior {
            Some(_) => self.by_policies(&up, &down, range, now),
            None => without_behavior(range),
        };
        Normalized { stabilized, limited }
    }

    fn stabilize(&mut self, windows: Windows, range: Range, now: Timestamp) -> i32 {
        let Windows { up, down, has_behavior } = windows;
        let desired = range.desired;
        let within = |window: i32| recent(&self.recommendations, window, now).map(|record| record.replicas);
        let lowest = within(up).min().unwrap_or(desired).min(desired);
        let highest = within(down).max().unwrap_or(desired).max(desired);
        // Only the last recommendation of each number is needed to compute the lowest and the highest recommendation.
        self.recommendations.retain(|record| record.replicas != desired);
        keep(&mut self.recommendations, up.max(down), Record { at: now, replicas: desired });
        // Without a behavior only decreases are delayed.
        if has_behavior { range.current.max(lowest).min(highest) } else { highest }
    }

    fn by_policies(&self, up: &Rules<'_>, down: &Rules<'_>, range: Range, now: Timestamp) -> Limited {
        let Range { current, desired, min, max, .. } = range;
        let before = |policy: &HPAScalingPolicy| {
            let sum = |list: &[Record]| {
                recent(list, policy.period_seconds, now)
                    .fold(0_i32, |sum, event| sum.saturating_add(event.replicas))
            };
            current.saturating_sub(sum(&self.ups)).saturating_add(sum(&self.downs))
        };
        if desired > current {
            let limit = up.limit(current, |policy| {
                let (start, value) = (before(policy), policy.value);
                match policy.type_.as_str() {
                    "Pods" => start.saturating_add(value),
                    _ => (f64::from(start) * (1.0 + f64::from(value) / 100.0)).ceil() as i32,
                }
            });
            let limit = limit.max(current);
            let (highest, why) = if max > limit { (limit, TOO_FAST_UP) } else { (max, TOO_MANY) };
            if desired > highest {
                return range.limited(highest, why);
            }
        } else if desired < current {
            let limit = down.limit_down(current, |policy| {
                let (start, value) = (before(policy), policy.value);
                match policy.type_.as_str() {
                    "Pods" => start.saturating_sub(value),
                    _ => (f64::from(start) * (1.0 - f64::from(value) / 100.0)) as i32,
                }
            });
            let limit = limit.min(current);
            let (lowest, why) = if min < limit { (limit, TOO_FAST_DOWN) } else { (min, TOO_FEW) };
            if desired < lowest {
                return range.limited(lowest, why);
            }
        }
        range.limited(desired, IN_RANGE)
    }

    /// Records a change of the target's replicas. Only behavior policies use the records.
    pub(super) fn scaled(
        &mut self,
        behavior: Option<&HorizontalPodAutoscalerBehavior>,
        before: i32,
        after: i32,
        now: Timestamp,
    ) {
        let Some(behavior) = behavior else { return };
        let periods = |rules: &Rules<'_>| rules.policies.iter().map(|policy| policy.period_seconds).max();
        let (up, down) =
            (Rules::of(behavior.scale_up.as_ref(), 0), Rules::of(behavior.scale_down.as_ref(), 0));
        // Policies of each direction consider the changes in both directions.
        let longest = periods(&up).max(periods(&down)).unwrap_or_default();
        let list = if after > before { &mut self.ups } else { &mut self.downs };
        let replicas = before.abs_diff(after).try_into().unwrap_or(i32::MAX);
        keep(list, longest, Record { at: now, replicas });
    }
}

/// The records of the last `seconds`.
fn recent(list: &[Record], seconds: i32, now: Timestamp) -> impl Iterator<Item = &Record> {
    let longest = SignedDuration::from_secs(seconds.into());
    list.iter().filter(move |record| now.duration_since(record.at) < longest)
}

/// Adds a record, and removes the records that are older than `seconds`.
fn keep(list: &mut Vec<Record>, seconds: i32, new: Record) {
    let longest = SignedDuration::from_secs(seconds.into());
    list.retain(|record| new.at.duration_since(record.at) < longest);
    list.push(new);
    if list.len() > MAX_HISTORY {
        list.remove(0);
    }
}

fn without_behavior(range: Range) -> Limited {
    let limit = range.current.saturating_mul(2).max(MIN_SCALE_UP_LIMIT);
    let (highest, why) = if range.max > limit { (limit, TOO_FAST_UP) } else { (range.max, TOO_MANY) };
    if range.desired < range.min {
        range.limited(range.min, TOO_FEW)
    } else if range.desired > highest {
        range.limited(highest, why)
    } else {
        range.limited(range.desired, IN_RANGE)
    }
}

// === impl Rules ===

impl<'a> Rules<'a> {
    /// The rules of one direction. `window` is the default of the stabilization window in seconds.
    fn of(rules: Option<&'a HPAScalingRules>, window: i32) -> Self {
        Self {
            window: rules.and_then(|rules| rules.stabilization_window_seconds).unwrap_or(window),
            policies: rules.and_then(|rules| rules.policies.as_deref()).unwrap_or_default(),
            select: rules.and_then(|rules| rules.select_policy.as_deref()).unwrap_or("Max"),
        }
    }

    fn limit(&self, current: i32, of: impl Fn(&HPAScalingPolicy) -> i32) -> i32 {
        let limits = self.policies.iter().map(of);
        match self.select {
            "Disabled" => Some(current),
            "Min" => limits.min(),
            _ => limits.max(),
        }
        .unwrap_or(i32::MAX)
    }

    /// The lowest number of replicas that a policy allows. `Max` selects the largest change, which gives the smallest
    /// number.
    fn limit_down(&self, current: i32, of: impl Fn(&HPAScalingPolicy) -> i32) -> i32 {
        let limits = self.policies.iter().map(of);
        match self.select {
            "Disabled" => Some(current),
            "Min" => limits.max(),
            _ => limits.min(),
        }
        .unwrap_or(i32::MIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + seconds).unwrap()
    }

    fn range(current: i32, desired: i32) -> Range {
        Range { current, desired, min: 1, max: 100, down_window: Duration::from_secs(300) }
    }

    fn behavior(value: Value) -> HorizontalPodAutoscalerBehavior {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn without_behavior_replicas_double_and_decrease_after_five_minutes() {
        let mut history = History::default();
        history.begin(10, at(0));
        let up = history.normalize(None, range(10, 50), at(0));
        assert_eq!((up.limited.replicas, up.limited.why), (20, TOO_FAST_UP));
        let down = history.normalize(None, range(20, 5), at(100));
        assert_eq!((down.limited.replicas, down.stabilized.why.reason), (40, "ScaleDownStabilized"));
        let later = history.normalize(None, range(20, 5), at(400));
        assert_eq!((later.limited.replicas, later.stabilized.why), (5, READY));
        let few = history.normalize(None, Range { min: 3, ..range(3, 1) }, at(1000));
        assert_eq!((few.limited.replicas, few.limited.why), (3, TOO_FEW));
    }

    #[test]
    fn the_default_window_of_a_decrease_is_an_option() {
        for (window, expect) in [(60, 5), (300, 10)] {
            let range = Range { down_window: Duration::from_secs(window), ..range(10, 5) };
            let mut history = History::default();
            history.begin(10, at(0));
            assert_eq!(history.normalize(None, range, at(100)).limited.replicas, expect, "{window}");
        }
        let mut history = History::default();
        let rules = behavior(json!({"scaleDown": {"stabilizationWindowSeconds": 0}}));
        history.begin(10, at(0));
        assert_eq!(history.normalize(Some(&rules), range(10, 5), at(1)).limited.replicas, 5);
    }

    #[test]
    fn repeated_recommendations_take_one_entry() {
        let mut history = History::default();
        for second in 0..1000 {
            history.normalize(None, range(20, if second == 0 { 40 } else { 5 }), at(second / 10));
        }
        assert_eq!(history.recommendations.len(), 2);
        let held = history.normalize(None, range(20, 5), at(200));
        assert_eq!(held.stabilized.replicas, 40, "the first recommendation is not forgotten");
    }

    #[test]
    fn policies_limit_the_change_of_a_period() {
        let rules = behavior(json!({
            "scaleUp": {"stabilizationWindowSeconds": 0, "selectPolicy": "Max",
                "policies": [{"type": "Pods", "value": 4, "periodSeconds": 60}]},
            "scaleDown": {"stabilizationWindowSeconds": 0, "selectPolicy": "Min", "policies": [
                {"type": "Percent", "value": 50, "periodSeconds": 60},
                {"type": "Pods", "value": 1, "periodSeconds": 60},
            ]},
        }));
        let mut history = History::default();
        let first = history.normalize(Some(&rules), range(10, 30), at(0));
        assert_eq!((first.limited.replicas, first.limited.why), (14, TOO_FAST_UP));
        history.scaled(Some(&rules), 10, 14, at(0));
        assert_eq!(history.normalize(Some(&rules), range(14, 30), at(30)).limited.replicas, 14);
        assert_eq!(history.normalize(Some(&rules), range(14, 30), at(61)).limited.replicas, 18);
        let down = History::default().normalize(Some(&rules), range(10, 1), at(0));
        assert_eq!((down.limited.replicas, down.limited.why), (9, TOO_FAST_DOWN));
    }

    #[test]
    fn a_window_of_increases_takes_the_lowest_recommendation() {
        let rules = behavior(json!({
            "scaleUp": {"stabilizationWindowSeconds": 60,
                "policies": [{"type": "Percent", "value": 900, "periodSeconds": 15}]},
            "scaleDown": {"selectPolicy": "Disabled"},
        }));
        let mut history = History::default();
        history.begin(2, at(0));
        let held = history.normalize(Some(&rules), range(2, 9), at(10));
        assert_eq!((held.limited.replicas, held.stabilized.why.reason), (2, "ScaleUpStabilized"));
        assert_eq!(history.normalize(Some(&rules), range(2, 9), at(65)).limited.replicas, 9);
        assert_eq!(History::default().normalize(Some(&rules), range(9, 2), at(0)).limited.replicas, 9);
    }
}
