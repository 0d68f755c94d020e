//! Bandwidth limits of links: token buckets, and the redirection of incoming packets to a device with a bucket.

use futures::{StreamExt, TryStreamExt};
use netlink_packet_core::{DefaultNla, NetlinkMessage, NetlinkPayload, Nla, NlasIterator};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::InfoKind;
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage, TcOption};
use rtnetlink::packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST};
use rtnetlink::{LinkIfb, LinkUnspec};

use super::{Link, Links, failed, is_errno};
use crate::error::Error;

/// A token bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bucket {
    /// Bytes per second.
    pub(crate) rate: u64,
    /// Burst in bytes.
    pub(crate) burst: u32,
}

/// Prefix of an intermediate device's alias. The link's name follows.
const ALIAS_PREFIX: &str = "coracle: limits of ";
const TBF: &str = "tbf";
/// `TCA_TBF_*`.
const PARAMETERS: u16 = 1;
const RATE_64: u16 = 4;
const BURST: u16 = 6;
/// Maximum delay of a packet in a bucket, in microseconds.
const LATENCY: u64 = 25_000;

// === impl Bucket ===

impl Bucket {
    /// The attributes of the bucket: `struct tc_tbf_qopt` of linux/pkt_sched.h, a rate of 64 bits if necessary, the
    /// burst.
    fn options(self) -> Vec<TcOption> {
        let rate = u32::try_from(self.rate).unwrap_or(u32::MAX);
        let queue = self.rate.saturating_mul(LATENCY) / 1_000_000 + u64::from(self.burst);
        // The time to send a burst, in ticks of the scheduler (64 ns each).
        let ticks = u128::from(self.burst) * 1_000_000_000 / u128::from(self.rate.max(1)) / 64;
        let mut qopt = vec![0; 8];
        qopt.extend_from_slice(&rate.to_ne_bytes());
        qopt.extend_from_slice(&[0; 12]);
        for value in [u32::try_from(queue).unwrap_or(u32::MAX), u32::try_from(ticks).unwrap_or(u32::MAX), 0] {
            qopt.extend_from_slice(&value.to_ne_bytes());
        }
        let mut options = vec![TcOption::Other(DefaultNla::new(PARAMETERS, qopt))];
        if self.rate > u64::from(u32::MAX) {
            options.push(TcOption::Other(DefaultNla::new(RATE_64, self.rate.to_ne_bytes().to_vec())));
        }
        options.push(TcOption::Other(DefaultNla::new(BURST, self.burst.to_ne_bytes().to_vec())));
        options
    }
}

impl Links {
    /// Makes an intermediate device for a link's traffic unless it exists, and sets it up. The device's alias names the
    /// link.
    pub(crate) async fn ensure_ifb(&self, name: &str, of: &Link) -> Result<Link, Error> {
        let message = LinkIfb::new(name).mtu(of.mtu).up().build();
        match self.handle.link().add(message).execute().await {
            Err(error) if !is_errno(&error, libc::EEXIST) => return Err(failed("create ifb", name)(error)),
            _ => {}
        }
        coracle_fault::point("bandwidth.device-made");
        let device = self.get(name).await?;
        let change = LinkUnspec::new_with_index(device.index).alias(format!("{ALIAS_PREFIX}{}", of.name));
        self.change(change, "mark", name).await?;
        Ok(device)
    }

    /// Removes intermediate devices whose links are gone: no packet reaches them any more.
    pub(crate) async fn sweep_ifbs(&self) -> Result<(), Error> {
        let links = self.all().await?;
        let is_there = |name: &str| links.iter().any(|link| link.name == name);
        for device in links.iter().filter(|link| link.kind == Some(InfoKind::Ifb)) {
            let Some(of) = device.alias.strip_prefix(ALIAS_PREFIX).filter(|of| !is_there(of)) else {
                continue;
            };
            // A dump during changes may be incomplete: check again.
            if self.find(of).await?.is_none() {
                self.delete(&device.name).await?;
            }
        }
        Ok(())
    }

    /// Limits packets that leave through the link.
    pub(crate) async fn set_bucket(&self, link: &Link, bucket: Bucket) -> Result<(), Error> {
        let mut message = TcMessage::with_index(i32::try_from(link.index).unwrap_or_default());
        message.header.parent = TcHandle::ROOT;
        message.header.handle = TcHandle { major: 1, minor: 0 };
        message.attributes.push(TcAttribute::Kind(TBF.to_owned()));
        message.attributes.push(TcAttribute::Options(bucket.options()));
        let mut request = NetlinkMessage::from(RouteNetlinkMessage::NewQueueDiscipline(message));
        request.header.flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
        let wrong = failed("limit the traffic of", &link.name);
        let mut answers = self.handle.clone().request(request).map_err(&wrong)?;
        while let Some(answer) = answers.next().await {
            if let NetlinkPayload::Error(error) = answer.payload
                && error.code.is_some()
            {
                return Err(wrong(rtnetlink::Error::NetlinkError(error)));
            }
        }
        Ok(())
    }

    /// Redirects incoming packets of the link to another link, whose bucket limits them.
    pub(crate) async fn redirect_to_ifb(&self, link: &Link, to: &Link) -> Result<(), Error> {
        const INGRESS: u32 = 0xffff_0000;
        const ALL: u16 = 0x0003;
        let wrong = failed("redirect the traffic of", &link.name);
        let index = i32::try_from(link.index).unwrap_or_default();
        match self.handle.qdisc().add(index).ingress().execute().await {
            // An interrupted ADD may have left the ingress qdisc.
            Err(error) if is_errno(&error, libc::EEXIST) => {}
            added => added.map_err(&wrong)?,
        }
        coracle_fault::point("bandwidth.detour-begun");
        let filter =
            self.handle.traffic_filter(index).add().parent(INGRESS).priority(1).protocol(ALL.to_be());
        filter.redirect(to.index).map_err(&wrong)?.execute().await.map_err(&wrong)
    }

    /// Rate of the link's bucket in bytes per second. `None` without a bucket.
    pub(crate) async fn bucket_rate(&self, link: &Link) -> Result<Option<u64>, Error> {
        let index = i32::try_from(link.index).unwrap_or_default();
        let _guard = self.dump_lock.lock().await;
        let all: Vec<TcMessage> = self
            .handle
            .qdisc()
            .get()
            .index(index)
            .execute()
            .try_collect()
            .await
            .map_err(failed("list", "qdiscs"))?;
        Ok(all.iter().filter(|message| message.header.index == index).find_map(rate))
    }
}

fn rate(message: &TcMessage) -> Option<u64> {
    if !message.attributes.iter().any(|a| matches!(a, TcAttribute::Kind(kind) if kind == TBF)) {
        return None;
    }
    // The netlink library does not support this kind: it returns the options as one attribute that contains all
    // attributes of the kind.
    let options = message.attributes.iter().find_map(|a| match a {
        TcAttribute::Options(options) => match options.first() {
            Some(TcOption::Other(nla)) => Some(nla),
            _ => None,
        },
        _ => None,
    })?;
    let mut bytes = vec![0; options.value_len()];
    options.emit_value(&mut bytes);
    let value = |wanted: u16| {
        let mut all = NlasIterator::new(&bytes[..]).filter_map(Result::ok);
        all.find(|nla| nla.kind() == wanted).map(|nla| nla.value().to_vec())
    };
    match value(RATE_64) {
        Some(bytes) => Some(u64::from_ne_bytes(bytes.get(..8)?.try_into().ok()?)),
        None => Some(u64::from(u32::from_ne_bytes(value(PARAMETERS)?.get(8..12)?.try_into().ok()?))),
    }
}
