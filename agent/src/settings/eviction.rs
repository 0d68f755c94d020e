//! Eviction thresholds, as settings.

use std::collections::BTreeMap;

use anyhow::Context;
use coracle_agent::{EvictionThresholds, MinimumReclaim, SoftThreshold, SoftThresholds, Threshold};

use super::NodeSettings;
use super::value::{Percent, Thresholds};

/// Signals of imagefs, the file system of images. Here it is the same file system as nodefs.
const IMAGES_AVAILABLE: &str = "imagefs.available";
const IMAGES_INODES_FREE: &str = "imagefs.inodesFree";

/// Converts the settings to thresholds, and to the conditions under which a shortage ends.
pub(super) fn decide(node: &NodeSettings) -> anyhow::Result<EvictionThresholds> {
    let keeps_defaults = node.merge_default_eviction_settings;
    let unlisted = if keeps_defaults { EvictionThresholds::default() } else { EvictionThresholds::NONE };
    let thresholds = thresholds(node.eviction_hard.as_ref(), node.disk_free_percent, unlisted)?;
    let soft = soft(node.eviction_soft.as_ref(), &node.eviction_soft_grace_period)?;
    Ok(EvictionThresholds {
        soft: SoftThresholds { max_pod_grace: node.eviction_max_pod_grace_period, ..soft },
        minimum_reclaim: minimum_reclaim(node.eviction_minimum_reclaim.as_ref())?,
        pressure_transition: node.eviction_pressure_transition_period.0,
        ..thresholds
    })
}

/// Maps signals to thresholds. Without `eviction-hard`, the defaults of [`EvictionThresholds`] apply, and
/// `disk-free-percent` replaces the default of `nodefs.available`. `unlisted` has the thresholds of signals that are not
/// in `hard`.
fn thresholds(
    hard: Option<&Thresholds>,
    disk_free: Option<Percent>,
    unlisted: EvictionThresholds,
) -> anyhow::Result<EvictionThresholds> {
    let Some(Thresholds(signals)) = hard else {
        let defaults = EvictionThresholds::default();
        let nodefs_available = disk_free.map(|Percent(percent)| Threshold::percent(percent));
        return Ok(EvictionThresholds {
            nodefs_available: nodefs_available.unwrap_or(defaults.nodefs_available),
            ..defaults
        });
    };
    anyhow::ensure!(
        disk_free.is_none(),
        "eviction-hard and disk-free-percent are both set: use only one of them"
    );
    let mut thresholds = unlisted;
    for (signal, threshold) in signals {
        match signal.as_str() {
            "memory.available" => thresholds.memory_available = *threshold,
            "nodefs.available" => thresholds.nodefs_available = *threshold,
            "nodefs.inodesFree" => thresholds.nodefs_inodes_free = *threshold,
            "pid.available" => thresholds.pid_available = *threshold,
            IMAGES_AVAILABLE | IMAGES_INODES_FREE => {}
            other => anyhow::bail!(
                "eviction-hard: the signal {other} is not supported; use memory.available, nodefs.available, \
                 nodefs.inodesFree, imagefs.available, imagefs.inodesFree or pid.available"
            ),
        }
    }
    let with_images = |nodefs: Threshold, own: &str, images: &'static str| {
        let imagefs = signals.get(images).copied();
        match (larger(nodefs, imagefs), imagefs) {
            // nodefs has only its default, and one threshold is a quantity while the other is a percentage. So the
            // default does not apply.
            (Err(_), Some(imagefs)) if !signals.contains_key(own) => Ok(imagefs),
            (found, _) => found.context(images).context("eviction-hard"),
        }
    };
    thresholds.nodefs_available =
        with_images(thresholds.nodefs_available, "nodefs.available", IMAGES_AVAILABLE)?;
    thresholds.nodefs_inodes_free =
        with_images(thresholds.nodefs_inodes_free, "nodefs.inodesFree", IMAGES_INODES_FREE)?;
    Ok(thresholds)
}

/// The larger of the amounts for nodefs and imagefs. Images are on nodefs, so both amounts apply to one file system.
fn larger(nodefs: Threshold, imagefs: Option<Threshold>) -> anyhow::Result<Threshold> {
    let Some(imagefs) = imagefs else { return Ok(nodefs) };
    match (nodefs, imagefs) {
        (Threshold::Amount(nodefs), Threshold::Amount(imagefs)) => Ok(Threshold::Amount(nodefs.max(imagefs))),
        (Threshold::BasisPoints(nodefs), Threshold::BasisPoints(imagefs)) => {
            Ok(Threshold::BasisPoints(nodefs.max(imagefs)))
        }
        (Threshold::Amount(0) | Threshold::BasisPoints(0), other)
        | (other, Threshold::Amount(0) | Threshold::BasisPoints(0)) => Ok(other),
        _ => anyhow::bail!(
            "images are on nodefs, so imagefs and nodefs must both be quantities or both be percentages"
        ),
    }
}

/// Maps signals to soft thresholds with their grace periods.
fn soft(
    thresholds: Option<&Thresholds>,
    graces: &BTreeMap<String, String>,
) -> anyhow::Result<SoftThresholds> {
    let mut soft = SoftThresholds::NONE;
    let (mut images_available, mut images_inodes_free) = (None, None);
    for (signal, threshold) in thresholds.into_iter().flat_map(|Thresholds(thresholds)| thresholds) {
        let grace = graces.get(signal).with_context(|| {
            format!("eviction-soft: the signal {signal} has no period in eviction-soft-grace-period")
        })?;
        let grace = coracle_agent::duration(grace).with_context(|| {
            format!("eviction-soft-grace-period: {signal}={grace} is not a duration such as 90s")
        })?;
        let one = SoftThreshold { threshold: *threshold, grace };
        match signal.as_str() {
            "memory.available" => soft.memory_available = one,
            "nodefs.available" => soft.nodefs_available = one,
            "nodefs.inodesFree" => soft.nodefs_inodes_free = one,
            "pid.available" => soft.pid_available = one,
            IMAGES_AVAILABLE => images_available = Some(one),
            IMAGES_INODES_FREE => images_inodes_free = Some(one),
            other => anyhow::bail!(
                "eviction-soft: the signal {other} is not supported; use memory.available, nodefs.available, \
                 nodefs.inodesFree, imagefs.available, imagefs.inodesFree or pid.available"
            ),
        }
    }
    let with_images = |nodefs: SoftThreshold, imagefs: Option<SoftThreshold>, signal: &'static str| {
        larger_soft(nodefs, imagefs).context(signal).context("eviction-soft")
    };
    soft.nodefs_available = with_images(soft.nodefs_available, images_available, IMAGES_AVAILABLE)?;
    soft.nodefs_inodes_free = with_images(soft.nodefs_inodes_free, images_inodes_free, IMAGES_INODES_FREE)?;
    Ok(soft)
}

/// The larger one of two soft thresholds of one file system, with its grace period. Of equal thresholds the shorter
/// grace period applies.
fn larger_soft(nodefs: SoftThreshold, imagefs: Option<SoftThreshold>) -> anyhow::Result<SoftThreshold> {
    let Some(imagefs) = imagefs else { return Ok(nodefs) };
    let threshold = larger(nodefs.threshold, Some(imagefs.threshold))?;
    let graces = [nodefs, imagefs].into_iter().filter(|one| one.threshold == threshold).map(|one| one.grace);
    Ok(SoftThreshold { threshold, grace: graces.min().unwrap_or(imagefs.grace) })
}

/// Maps signals to the amounts that have to be available beyond their thresholds.
fn minimum_reclaim(amounts: Option<&Thresholds>) -> anyhow::Result<MinimumReclaim> {
    let mut reclaim = MinimumReclaim::NONE;
    for (signal, amount) in amounts.into_iter().flat_map(|Thresholds(amounts)| amounts) {
        match signal.as_str() {
            "memory.available" => reclaim.memory_available = *amount,
            "nodefs.available" => reclaim.nodefs_available = *amount,
            "nodefs.inodesFree" => reclaim.nodefs_inodes_free = *amount,
            "pid.available" => reclaim.pid_available = *amount,
            IMAGES_AVAILABLE | IMAGES_INODES_FREE => {}
            other => anyhow::bail!(
                "eviction-minimum-reclaim: the signal {other} is not supported; use memory.available, \
                 nodefs.available, nodefs.inodesFree, imagefs.available, imagefs.inodesFree or pid.available"
            ),
        }
    }
    let of_images = |signal: &str| amounts.and_then(|Thresholds(amounts)| amounts.get(signal).copied());
    let with_images = |nodefs: Threshold, signal: &'static str| {
        larger(nodefs, of_images(signal)).context(signal).context("eviction-minimum-reclaim")
    };
    reclaim.nodefs_available = with_images(reclaim.nodefs_available, IMAGES_AVAILABLE)?;
    reclaim.nodefs_inodes_free = with_images(reclaim.nodefs_inodes_free, IMAGES_INODES_FREE)?;
    Ok(reclaim)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::value::Value as _;
    use super::*;

    fn of(text: &str, disk_free: Option<u8>) -> anyhow::Result<EvictionThresholds> {
        let texts: Vec<String> = text.split(',').map(str::to_owned).collect();
        let hard = Option::<Thresholds>::parse(&texts).map_err(anyhow::Error::msg)?;
        thresholds(hard.as_ref(), disk_free.map(Percent), EvictionThresholds::NONE)
    }

    #[test]
    fn without_thresholds_the_kubelets_defaults_apply() {
        let of_nothing = |disk_free| thresholds(None, disk_free, EvictionThresholds::NONE).unwrap();
        assert_eq!(of_nothing(None), EvictionThresholds::default());
        assert_eq!(of_nothing(Some(Percent(1))).nodefs_available, Threshold::percent(1));
    }

    #[test]
    fn signals_that_are_not_listed_keep_their_defaults_on_request() {
        let node = |text: &str| decide(&super::super::tests::node_settings(text).unwrap()).unwrap();
        let hard = "eviction-hard = { \"memory.available\" = \"1Gi\" }";
        let merged = node(&format!("{hard}\nmerge-default-eviction-settings = true"));
        let expected = EvictionThresholds {
            memory_available: Threshold::Amount(1 << 30),
            ..EvictionThresholds::default()
        };
        assert_eq!(merged, expected);
        assert_eq!(node(hard).nodefs_available, EvictionThresholds::NONE.nodefs_available);
    }

    #[test]
    fn a_threshold_of_images_does_not_conflict_with_a_default_of_pods() {
        let node = |images: &str| {
            let text = format!(
                "eviction-hard = {{ \"imagefs.available\" = \"{images}\" }}\nmerge-default-eviction-settings = true"
            );
            decide(&super::super::tests::node_settings(&text).unwrap()).unwrap().nodefs_available
        };
        assert_eq!(node("1Gi"), Threshold::Amount(1 << 30));
        assert_eq!(node("15%"), Threshold::percent(15));
        assert_eq!(node("5%"), Threshold::percent(10), "the default of nodefs stays");
    }

    #[test]
    fn of_the_signals_of_images_and_pods_the_larger_threshold_applies() {
        let nodefs = |text: &str| of(text, None).map(|found| found.nodefs_available);
        assert_eq!(nodefs("imagefs.available<5%,nodefs.available<10%").unwrap(), Threshold::percent(10));
        assert_eq!(nodefs("imagefs.available<15%,nodefs.available<10%").unwrap(), Threshold::percent(15));
        assert_eq!(nodefs("imagefs.available<15%").unwrap(), Threshold::percent(15));
        assert_eq!(nodefs("imagefs.available<0%,nodefs.available<1Gi").unwrap(), Threshold::Amount(1 << 30));
        assert_eq!(nodefs("imagefs.available<2Gi,nodefs.available<1Gi").unwrap(), Threshold::Amount(2 << 30));
        let inodes = of("imagefs.inodesFree<7%,nodefs.inodesFree<5%", None).unwrap().nodefs_inodes_free;
        assert_eq!(inodes, Threshold::percent(7));
        let error = format!("{:#}", nodefs("imagefs.available<15%,nodefs.available<1Gi").unwrap_err());
        assert!(error.starts_with("eviction-hard: imagefs.available: images are on nodefs"), "{error}");
    }

    #[test]
    fn a_signal_that_is_not_listed_has_no_threshold() {
        let thresholds =
            of("memory.available<200Mi,nodefs.available<12.5%,imagefs.available<15%", None).unwrap();
        let expected = EvictionThresholds {
            memory_available: Threshold::parse("200Mi").unwrap(),
            nodefs_available: Threshold::percent(15),
            ..EvictionThresholds::NONE
        };
        assert_eq!(thresholds, expected);
    }

    #[test]
    fn a_node_whose_only_threshold_is_zero_is_never_under_pressure() {
        let thresholds = of("nodefs.available=0%", None).unwrap();
        let all = [
            thresholds.memory_available,
            thresholds.nodefs_available,
            thresholds.nodefs_inodes_free,
            thresholds.pid_available,
        ];
        let zero = [Threshold::Amount(0), Threshold::percent(0)];
        assert!(all.into_iter().all(|threshold| zero.contains(&threshold)), "{thresholds:?}");
    }

    #[test]
    fn soft_thresholds_have_a_grace_period() {
        let parse = |text: &str| Option::<Thresholds>::parse(&[text.to_owned()]).unwrap();
        let graces = |signal: &str, grace: &str| BTreeMap::from([(signal.to_owned(), grace.to_owned())]);
        let memory = parse("memory.available<1Gi");
        let found = soft(memory.as_ref(), &graces("memory.available", "1m30s")).unwrap();
        let one = SoftThreshold { threshold: Threshold::Amount(1 << 30), grace: Duration::from_secs(90) };
        assert_eq!(found, SoftThresholds { memory_available: one, ..SoftThresholds::NONE });
        assert_eq!(soft(None, &BTreeMap::new()).unwrap(), SoftThresholds::NONE);
        for (threshold, graces) in [
            ("memory.available<1Gi", graces("pid.available", "1m")),
            ("memory.available<1Gi", graces("memory.available", "soon")),
            ("imagefs.available<15%", graces("nodefs.available", "1m")),
            ("containerfs.available<15%", graces("containerfs.available", "1m")),
        ] {
            assert!(soft(parse(threshold).as_ref(), &graces).is_err(), "{threshold} {graces:?}");
        }
    }

    #[test]
    fn of_the_soft_thresholds_of_images_and_pods_the_larger_one_applies_with_its_grace_period() {
        let of = |imagefs: &str, nodefs: &str| {
            let texts = [("imagefs", imagefs), ("nodefs", nodefs)];
            let texts = texts.map(|(file_system, threshold)| format!("{file_system}.available<{threshold}"));
            let thresholds = Option::<Thresholds>::parse(&texts).unwrap();
            let graces = [("imagefs.available", "1m"), ("nodefs.available", "2m")];
            let graces = graces.map(|(signal, grace)| (signal.to_owned(), grace.to_owned()));
            soft(thresholds.as_ref(), &graces.into()).map(|found| found.nodefs_available)
        };
        let minutes = |threshold: Threshold, minutes: u64| SoftThreshold {
            threshold,
            grace: Duration::from_secs(60 * minutes),
        };
        assert_eq!(of("15%", "10%").unwrap(), minutes(Threshold::percent(15), 1));
        assert_eq!(of("5%", "10%").unwrap(), minutes(Threshold::percent(10), 2));
        assert_eq!(of("10%", "10%").unwrap(), minutes(Threshold::percent(10), 1));
        let error = format!("{:#}", of("15%", "1Gi").unwrap_err());
        assert!(error.starts_with("eviction-soft: imagefs.available: images are on nodefs"), "{error}");
        let inodes = Option::<Thresholds>::parse(&["imagefs.inodesFree<7%".to_owned()]).unwrap();
        let graces = BTreeMap::from([("imagefs.inodesFree".to_owned(), "1m".to_owned())]);
        let inodes = soft(inodes.as_ref(), &graces).unwrap().nodefs_inodes_free;
        assert_eq!(inodes, minutes(Threshold::percent(7), 1));
    }

    #[test]
    fn each_minimum_reclaim_belongs_to_its_signal() {
        let parse = |text: &str| Option::<Thresholds>::parse(&[text.to_owned()]).unwrap();
        let amounts = minimum_reclaim(parse("nodefs.available=10%").as_ref()).unwrap();
        let expected = MinimumReclaim { nodefs_available: Threshold::percent(10), ..MinimumReclaim::NONE };
        assert_eq!(amounts, expected);
        assert_eq!(minimum_reclaim(None).unwrap(), MinimumReclaim::NONE);
        let of_images = minimum_reclaim(parse("imagefs.available=10%").as_ref()).unwrap();
        assert_eq!(of_images, expected);
        assert!(minimum_reclaim(parse("containerfs.available=10%").as_ref()).is_err());
    }

    #[test]
    fn unsupported_and_invalid_thresholds_are_refused() {
        for wrong in
            ["containerfs.available<20%", "memory.free<1Gi", "memory.available", "nodefs.available<101%"]
        {
            assert!(of(wrong, None).is_err(), "{wrong}");
        }
        assert!(of("memory.available<1Gi", Some(10)).is_err());
    }
}
