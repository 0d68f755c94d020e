//! The codec of the lists of devices that a plugin sends. The codec counts the devices while it decodes them.
//!
//! The generated code decodes a list as a whole. A list of 4 MiB can have two million empty devices, which would take
//! up to 300 MB of memory before they are refused.

use bytes::Buf;
use coracle_proto::device_plugin as api;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// Maximum devices of a resource.
pub(super) const DEVICES_MAX: usize = 1 << 16;
/// Maximum NUMA nodes of a device.
pub(super) const NODES_MAX: usize = 64;

/// The codec of ListAndWatch.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListCodec;

/// Encodes a request, which has no fields.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestEncoder;

/// Decodes a list. If it has too many devices or NUMA nodes, one more than the limit is decoded, so that the caller
/// refuses the list.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListDecoder;

/// The remaining fields of an encoded message.
struct Fields<'a>(&'a [u8]);

/// The value of a field.
enum Field<'a> {
    Number(u64),
    /// A text, or a message.
    Bytes(&'a [u8]),
    /// A wire type that no field of these messages has.
    Other,
}

// === impl ListCodec ===

impl Codec for ListCodec {
    type Encode = api::Empty;
    type Decode = api::ListAndWatchResponse;
    type Encoder = RequestEncoder;
    type Decoder = ListDecoder;

    fn encoder(&mut self) -> RequestEncoder {
        RequestEncoder
    }

    fn decoder(&mut self) -> ListDecoder {
        ListDecoder
    }
}

impl Encoder for RequestEncoder {
    type Item = api::Empty;
    type Error = Status;

    fn encode(&mut self, _request: api::Empty, _target: &mut EncodeBuf<'_>) -> Result<(), Status> {
        Ok(())
    }
}

impl Decoder for ListDecoder {
    type Item = api::ListAndWatchResponse;
    type Error = Status;

    fn decode(&mut self, source: &mut DecodeBuf<'_>) -> Result<Option<api::ListAndWatchResponse>, Status> {
        let message = source.copy_to_bytes(source.remaining());
        list(&message).map(Some)
    }
}

fn list(message: &[u8]) -> Result<api::ListAndWatchResponse, Status> {
    let mut devices = Vec::new();
    for field in Fields(message) {
        if let (1, Field::Bytes(encoded)) = field? {
            devices.push(device(encoded)?);
            if devices.len() > DEVICES_MAX {
                break;
            }
        }
    }
    Ok(api::ListAndWatchResponse { devices })
}

/// Fuzz target: a list of devices.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(found) = list(data) else { return };
    let nodes = |device: &api::Device| device.topology.as_ref().map_or(0, |topology| topology.nodes.len());
    assert!(found.devices.len() <= DEVICES_MAX + 1);
    assert!(found.devices.iter().all(|device| nodes(device) <= NODES_MAX + 1));
}

fn device(message: &[u8]) -> Result<api::Device, Status> {
    let mut device = api::Device::default();
    for field in Fields(message) {
        match field? {
            (1, Field::Bytes(id)) => device.id = text(id)?,
            (2, Field::Bytes(health)) => device.health = text(health)?,
            (3, Field::Bytes(topology)) => {
                let nodes = &mut device.topology.get_or_insert_default().nodes;
                for field in Fields(topology) {
                    if let (1, Field::Bytes(encoded)) = field?
                        && nodes.len() <= NODES_MAX
                    {
                        nodes.push(numa_node(encoded)?);
                    }
                }
            }
            _ => {}
        }
    }
    Ok(device)
}

fn numa_node(message: &[u8]) -> Result<api::NumaNode, Status> {
    let mut node = api::NumaNode::default();
    for field in Fields(message) {
        if let (1, Field::Number(id)) = field? {
            node.id = id.cast_signed();
        }
    }
    Ok(node)
}

fn text(bytes: &[u8]) -> Result<String, Status> {
    std::str::from_utf8(bytes).ok().map(str::to_owned).ok_or_else(malformed)
}

fn malformed() -> Status {
    Status::internal("the list of devices is not a valid message")
}

// === impl Fields ===

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Field<'a>), Status>;

    /// The number and the value of the next field. After an error there is no further field.
    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field.ok_or_else(malformed))
    }
}

impl<'a> Fields<'a> {
    /// The next field. Source: https://protobuf.dev/programming-guides/encoding/. Groups, which are deprecated, are
    /// refused.
    fn field(&mut self) -> Option<(u64, Field<'a>)> {
        let key = self.number()?;
        let value = match key & 7 {
            0 => Field::Number(self.number()?),
            1 => self.take(8).map(|_| Field::Other)?,
            2 => {
                let length = usize::try_from(self.number()?).ok()?;
                Field::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Field::Other)?,
            _ => return None,
        };
        Some((key >> 3, value))
    }

    /// A number of up to ten bytes with seven bits each, the lowest first.
    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }

    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An encoded field with a text or a message below 128 bytes.
    fn field(number: u8, content: &[u8]) -> Vec<u8> {
        let head = [(number << 3) | 2, u8::try_from(content.len()).unwrap()];
        [&head[..], content].concat()
    }

    #[test]
    fn a_list_is_decoded() {
        let node = |id: &[u8]| field(1, &[&[1 << 3][..], id].concat());
        let topology =
            [node(&[3]), node(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1])].concat();
        // Fields that newer versions may add: a number, four bytes, and eight bytes.
        let newer: [&[u8]; 3] =
            [&[9 << 3, 0x96, 1], &[(10 << 3) | 5, 0, 0, 0, 0], &[(11 << 3) | 1, 0, 0, 0, 0, 0, 0, 0, 0]];
        let first = [field(1, b"a"), field(2, b"Healthy"), newer.concat(), field(3, &topology)].concat();
        let message = [field(1, &first), field(9, b"x"), field(1, &[])].concat();
        let nodes = vec![api::NumaNode { id: 3 }, api::NumaNode { id: -1 }];
        let first = api::Device {
            id: "a".to_owned(),
            health: "Healthy".to_owned(),
            topology: Some(api::TopologyInfo { nodes }),
        };
        assert_eq!(list(&message).unwrap().devices, [first, api::Device::default()]);
        assert!(list(&[]).unwrap().devices.is_empty());
    }

    #[test]
    fn an_invalid_message_is_refused() {
        let long = [0xff; 11];
        let bad: [&[u8]; 6] =
            [&[0x0a], &[0x0a, 2, 0x0a], &[0x0b], &long, &[0x0a, 3, 0x0a, 1, 0xff], &[0x09, 0]];
        for message in bad {
            assert!(list(message).is_err(), "{message:?}");
        }
    }

    #[test]
    fn devices_and_nodes_above_the_limits_are_not_decoded() {
        let empty = field(1, &[]);
        assert_eq!(list(&empty.repeat(2 << 20)).unwrap().devices.len(), DEVICES_MAX + 1);
        let nodes = field(1, &[]).repeat(2 * NODES_MAX);
        let topology = [&[(3 << 3) | 2, 0x80, 2][..], &nodes[..]].concat();
        assert_eq!(nodes.len(), 256);
        assert_eq!(device(&topology).unwrap().topology.unwrap().nodes.len(), NODES_MAX + 1);
    }
}
