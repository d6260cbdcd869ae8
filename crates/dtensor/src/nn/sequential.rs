//! A sequence of layers.

use std::any::Any;
use std::fmt;
use std::ops::Index;

use super::{Base, Layer, Module, Walk, forward};
use crate::{Result, Tensor};

/// A sequence of layers of any types, each applied to the output of the one before. The children are named `0`, `1`,
/// ….
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
    layers: Vec<Box<dyn CloneLayer>>,
    base: Base,
}

/// A layer that can be cloned as a trait object.
trait CloneLayer: Layer + Send + Sync {
    fn clone_boxed(&self) -> Box<dyn CloneLayer>;
}

impl<L: Layer + Clone + Send + Sync + 'static> CloneLayer for L {
    fn clone_boxed(&self) -> Box<dyn CloneLayer> {
        Box::new(self.clone())
    }
}

#[forward]
impl Sequential {
    /// Creates an empty sequence, which returns its input.
    pub fn new() -> Self {
        Sequential::default()
    }

    /// Appends a layer.
    pub fn push(mut self, layer: impl Layer + Clone + Send + Sync + 'static) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// Returns the number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Returns true if there are no layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Returns the layer at index `i`, if there is one.
    pub fn get(&self, i: usize) -> Option<&dyn Layer> {
        self.layers.get(i).map(|layer| &**layer as &dyn Layer)
    }

    /// Iterates over the layers, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &dyn Layer> + ExactSizeIterator {
        self.layers.iter().map(|layer| &**layer as &dyn Layer)
    }

    /// Applies the layers, in order.
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
            layers: self.layers.iter().map(|layer| layer.clone_boxed()).collect(),
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
