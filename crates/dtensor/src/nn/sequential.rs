//! Layers one after the other.

use std::any::Any;
use std::fmt;
use std::ops::Index;

use super::{Base, Layer, Module, Walk, forward};
use crate::{Result, Tensor};

/// Layers of any types, each given what the one before gives. They are children under their numbers: `0`, `1`, ….
///
/// ```
/// use dtensor::nn::{Linear, Module, Relu, Sequential};
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let model = Sequential::new()
///     .push(Linear::new(10, 16, true)?)
///     .push(Relu::new())
///     .push(Linear::new(16, 10, true)?);
/// assert_eq!(model.forward(&Tensor::ones([4, 10], DType::F32)?)?.dims(), [4, 10]);
/// assert_eq!(model.get_parameter("2.weight")?.get().dims(), [10, 16]);
/// assert_eq!(model[1].kind(), "Relu");
/// assert_eq!(model.iter().filter(|layer| layer.kind() == "Linear").count(), 2);
/// # Ok(())
/// # }
/// ```
#[derive(Default)]
pub struct Sequential {
    layers: Vec<Box<dyn Element>>,
    base: Base,
}

/// A layer that can be cloned without its type being known.
trait Element: Layer + Send + Sync {
    fn cloned(&self) -> Box<dyn Element>;
}

impl<L: Layer + Clone + Send + Sync + 'static> Element for L {
    fn cloned(&self) -> Box<dyn Element> {
        Box::new(self.clone())
    }
}

#[forward]
impl Sequential {
    /// No layers: what goes in comes out.
    pub fn new() -> Self {
        Sequential::default()
    }

    /// With one more layer, after the others.
    pub fn push(mut self, layer: impl Layer + Clone + Send + Sync + 'static) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// How many layers there are.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// A layer, if there are so many.
    pub fn get(&self, i: usize) -> Option<&dyn Layer> {
        self.layers.get(i).map(|layer| &**layer as &dyn Layer)
    }

    /// The layers, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &dyn Layer> + ExactSizeIterator {
        self.layers.iter().map(|layer| &**layer as &dyn Layer)
    }

    /// Applies the layers.
    #[track_caller]
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        for layer in &self.layers {
            x = layer.forward(&x)?;
        }
        Ok(x)
    }
}

impl Index<usize> for Sequential {
    type Output = dyn Layer;

    fn index(&self, i: usize) -> &Self::Output {
        &*self.layers[i]
    }
}

impl Clone for Sequential {
    fn clone(&self) -> Self {
        Sequential {
            layers: self.layers.iter().map(|layer| layer.cloned()).collect(),
            base: self.base.clone(),
        }
    }
}

impl Module for Sequential {
    fn visit<'a>(&'a self, walk: &mut Walk<'a>) {
        walk.module("Sequential", self, |walk| {
            for (i, layer) in self.layers.iter().enumerate() {
                walk.child(&i.to_string(), layer);
            }
            walk.child("base", &self.base);
        });
    }

    fn base(&self) -> Option<&Base> {
        Some(&self.base)
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl fmt::Debug for Sequential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = self.iter().map(|layer| layer.kind()).collect::<Vec<_>>().join(", ");
        write!(f, "Sequential({kinds})")
    }
}
